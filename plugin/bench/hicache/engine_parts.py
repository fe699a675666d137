"""The measurements that one engine makes; every arm makes the same ones."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm_graft.bench.hicache import copy_graphs as graphs
from vllm_graft.bench.hicache.model_sizes import Sizes
from vllm_graft.bench.hicache.prompt_driver import Answer, Driver, random_prompt

if TYPE_CHECKING:
    from vllm import LLM

Row = dict[str, Any]

COUNTED = ("loads_layerwise", "loads_async", "recomputed", "load_bytes")
LEARNED = (
    "learned_load_bytes_per_second",
    "learned_prefill_tokens_per_second",
    "learned_step_seconds",
)


class Parts:
    """An engine under measurement."""

    def __init__(self, llm: LLM, sizes: Sizes) -> None:
        self._llm, self._sizes = llm, sizes
        self._driver = Driver(llm)
        self.graph_mode = graphs.install(llm)

    def warm(self) -> Row:
        """Run every shape once, so that nothing is compiled or measured first later on."""
        sizes = self._sizes
        count = min(sizes.decode_requests, sizes.max_num_seqs)
        prompts = [self._prompt(f"warm{i}", sizes.block * 2) for i in range(count)]
        self._driver.run(prompts, 4)
        self.ttft("warm")
        return {"graph_mode": self.graph_mode}

    def ttft(self, seed: str) -> Row:
        """Time a prompt of `prefix` known tokens and a new suffix; the device's cache is empty."""
        sizes, driver = self._sizes, self._driver
        prefix = self._prompt(f"prefix{seed}", sizes.prefix)
        driver.run([prefix + self._prompt(f"a{seed}", sizes.suffix)], 1)
        driver.settle()
        driver.forget_device()
        before = graphs.read(self._llm)
        counted = self._connector()
        (answer,) = driver.run([prefix + self._prompt(f"b{seed}", sizes.suffix)], 1)
        steps = graphs.read(self._llm) - before
        driver.settle(0.02)
        return {
            "ms": 1e3 * answer.ttft,
            "cached": answer.cached,
            "reason": answer.reason,
            "forwards": steps.forwards,
            "full": steps.full,
            **self._way(counted, answer.cached),
        }

    def decode(self, seed: str) -> Row:
        """Measure tokens per second once every request has its first, while K/V is written back."""
        sizes, driver = self._sizes, self._driver
        prompts = [
            self._prompt(f"decode{seed}-{i}", sizes.decode_prompt)
            for i in range(sizes.decode_requests)
        ]
        before, start = graphs.read(self._llm), time.perf_counter()
        for prompt in prompts:
            driver.submit(prompt, sizes.decode_tokens)
        while driver.waiting_for_first:
            driver.step()
        first, emitted = time.perf_counter(), driver.emitted
        while driver.busy:
            driver.step()
        end = time.perf_counter()
        steps = graphs.read(self._llm) - before
        driver.settle()
        return {
            "tokens_per_second": (driver.emitted - emitted) / (end - first),
            "with_prefill": sizes.decode_requests * sizes.decode_tokens / (end - start),
            "forwards": steps.forwards,
            "full": steps.full,
        }

    def load(self, seconds: float) -> Row:
        """Run all sessions at once; each sends its next turn when it has its answer.

        It stops early after `seconds`; `finished` is then below `turns`.
        """
        sizes, driver = self._sizes, self._driver
        driver.forget_device(connector=True)
        before, preempted = graphs.read(self._llm), self._counter("vllm:num_preemptions")
        counted = self._connector()
        start = time.perf_counter()
        answers = self._converse(start + seconds)
        elapsed = time.perf_counter() - start
        driver.abort_all()
        steps = graphs.read(self._llm) - before
        later = [answer for turn, answer in answers if turn]
        return {
            "turns": sizes.sessions * sizes.turns,
            "finished": len(answers),
            "seconds": elapsed,
            "turns_per_second": len(answers) / elapsed,
            "tokens_per_second": sum(len(a.prompt) + len(a.tokens) for _, a in answers) / elapsed,
            "ttft_ms": [round(1e3 * answer.ttft, 2) for _, answer in answers],
            "ttft_ms_later_turns": [round(1e3 * answer.ttft, 2) for answer in later],
            "hit_rate": sum(a.cached for a in later) / max(1, sum(len(a.prompt) for a in later)),
            "errors": sum(answer.reason != "length" for _, answer in answers),
            "preemptions": self._counter("vllm:num_preemptions") - preempted,
            "forwards": steps.forwards,
            "full": steps.full,
            **self._ways(counted),
        }

    def _converse(self, deadline: float) -> list[tuple[int, Answer]]:
        """Return (turn, answer) for every turn that ended before `deadline`."""
        sizes, driver = self._sizes, self._driver
        session_of: dict[str, tuple[int, int]] = {}
        for session in range(sizes.sessions):
            prompt = self._prompt(f"session{session}-0", sizes.turn_tokens)
            session_of[driver.submit(prompt, sizes.reply)] = session, 0
        answers = []
        while driver.busy and time.perf_counter() < deadline:
            for name, answer in driver.step().items():
                session, turn = session_of.pop(name)
                answers.append((turn, answer))
                if turn + 1 < sizes.turns:
                    said = self._prompt(f"session{session}-{turn + 1}", sizes.turn_tokens)
                    follow = driver.submit(answer.prompt + answer.tokens + said, sizes.reply)
                    session_of[follow] = session, turn + 1
        return answers

    def _connector(self) -> dict[str, float]:
        """Read our connector's counters and gauges; empty for the other arms."""
        prefix = "vllm:graft_hicache_"
        return {
            metric.name.removeprefix(prefix): getattr(metric, "value", 0)
            for metric in self._llm.get_metrics()
            if metric.name.startswith(prefix)
        }

    def _ways(self, before: dict[str, float]) -> Row:
        """Return how hits were loaded since `before`, and the rates that decided it."""
        now = self._connector()
        if not now:
            return {}
        moved = {name: now[name] - before.get(name, 0) for name in COUNTED}
        return moved | {name: now.get(name, 0) for name in LEARNED}

    def _way(self, before: dict[str, float], cached: int) -> Row:
        """Return the same for a single hit, with the way by name."""
        found = self._ways(before)
        if not found:
            return {}
        ways = [way for way in ("layerwise", "async") if found.pop(f"loads_{way}")]
        part = (
            "" if cached >= self._sizes.prefix // self._sizes.block * self._sizes.block else "part "
        )
        recomputed = found.pop("recomputed")
        return {"way": part + ways[0] if ways else "recomputed" if recomputed else "miss", **found}

    def _prompt(self, seed: str, length: int) -> list[int]:
        return random_prompt(seed, length, self._sizes.vocab)

    def _counter(self, name: str) -> float:
        return sum(getattr(m, "value", 0) for m in self._llm.get_metrics() if m.name == name)
