"""Full hits in FULL CUDA graphs while copies are slowed down: are the tokens right?

A prompt of k * block + 1 tokens that is wholly on the host leaves one token to compute, which vLLM
runs as a decode: in a FULL graph, where no Python runs between the layers. If the graph did not
wait for the load it would read what was in the blocks before, and that is overwritten here with a
constant before every load.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm_graft.bench.hicache import copy_graphs as graphs
from vllm_graft.bench.hicache.cache_arms import Plan, Row
from vllm_graft.bench.hicache.prompt_driver import Answer, Driver, random_prompt

if TYPE_CHECKING:
    from vllm import LLM

# It is finite, because masked positions are multiplied by zero, and far from a model's values.
POISON = 3.0


def _poison(worker: Any) -> None:
    import torch

    for cache in worker.model_runner.kv_caches:
        cache.fill_(POISON)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _delay(worker: Any, milliseconds: float) -> bool:
    """Delay each load on its stream; return False where the CPU makes the copies at once."""
    import torch
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if not torch.cuda.is_available():
        return False
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1000)
    start.record()
    torch.cuda._sleep(10_000_000)
    end.record()
    end.synchronize()
    cycles = int(10_000_000 * milliseconds / start.elapsed_time(end))
    engine = get_kv_transfer_group().worker.engine
    if not hasattr(engine, "_delay_cycles"):
        raise AttributeError(f"{type(engine).__name__} can no longer delay its loads")
    engine._delay_cycles = cycles
    return True


class Race:
    """An engine of ours that gets nothing but full hits."""

    def __init__(self, llm: LLM, plan: Plan) -> None:
        self._llm, self._sizes = llm, plan.sizes
        self._driver = Driver(llm)
        self._waves: list[list[list[int]]] = []
        self._expected: list[list[tuple[list[int], list[int]]]] = []
        self.graph_mode = graphs.install(llm)

    def warm(self) -> Row:
        """Compute and store all prompts; hits in the device's own cache give the reference."""
        sizes, driver = self._sizes, self._driver
        prompts = [
            random_prompt(f"race{i}", sizes.race_prompt, sizes.vocab)
            for i in range(sizes.race_prompts)
        ]
        self._waves = [
            prompts[i : i + sizes.race_batch] for i in range(0, len(prompts), sizes.race_batch)
        ]
        self._expected, local = [], True
        for wave in self._waves:
            driver.run(wave, sizes.race_tokens)
            again = driver.run(wave, sizes.race_tokens)
            local &= all(answer.cached == sizes.race_prompt - 1 for answer in again)
            # Loads may end in different steps: a batch of another size may round differently.
            alone = [driver.run([prompt], sizes.race_tokens)[0] for prompt in wave]
            self._expected.append([(a.tokens, b.tokens) for a, b in zip(again, alone)])
            driver.settle(0.02)
        different = len({tuple(first) for wave in self._expected for first, _ in wave})
        return {"graph_mode": self.graph_mode, "local_hits": local, "different": different}

    def control(self) -> Row:
        """Poison blocks in use, to show that wrong bytes change tokens; count the changes."""
        changed = 0
        for number, wave in enumerate(self._waves):
            self._driver.run(wave, self._sizes.race_tokens)
            self._llm.collective_rpc(_poison)
            changed += self._wrong(number, self._driver.run(wave, self._sizes.race_tokens))
            self._driver.forget_device()
        return {"requests": sum(map(len, self._waves)), "changed": changed}

    def race(self, count: int, seconds: float) -> Row:
        """Serve full hits until `count` requests were answered or `seconds` have passed."""
        sizes, driver = self._sizes, self._driver
        delayed = self._llm.collective_rpc(_delay, args=(sizes.race_delay_ms,))[0]
        before, start = graphs.read(self._llm), time.perf_counter()
        requests = wrong = full_hits = errors = wave_number = 0
        while requests < count and time.perf_counter() - start < seconds:
            number = wave_number % len(self._waves)
            driver.forget_device()
            self._llm.collective_rpc(_poison)
            answers = driver.run(self._waves[number], sizes.race_tokens)
            requests += len(answers)
            wrong += self._wrong(number, answers)
            full_hits += sum(answer.cached == sizes.race_prompt - 1 for answer in answers)
            errors += sum(answer.reason != "length" for answer in answers)
            wave_number += 1
        steps = graphs.read(self._llm) - before
        return {
            "requests": requests,
            "wrong": wrong,
            "errors": errors,
            "full_hits": full_hits,
            "forwards": steps.forwards,
            "full": steps.full,
            "delayed": delayed,
            "seconds": time.perf_counter() - start,
        }

    def _wrong(self, number: int, answers: list[Answer]) -> int:
        pairs = zip(answers, self._expected[number], strict=True)
        return sum(answer.tokens not in expected for answer, expected in pairs)
