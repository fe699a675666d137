"""Run engines with the host KV cache under injected faults and ``kill -9``: no token may be wrong.

    python -m tests.hicache.soak faults --count 10000
    python -m tests.hicache.soak kills --count 200

The tests run the same with small counts. Exit status 1 if a token was wrong, a request hung, or an
engine died by itself.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.engines.cache_engines import transfer

HANG_SECONDS = 30
HANG_STEPS = 500
"""A request that takes so many steps hangs; it is not just a busy machine."""
START_SECONDS = 300
"""Most seconds that an engine may take to start, even on a busy machine."""
TOKENS = 6
PROMPTS = 24
Prompt = list[int]
Tokens = dict[int, list[int]]


def prompts(count: int = PROMPTS) -> list[Prompt]:
    """Make prompts of token ids; of any three prompts, two share a prefix."""
    numbers = random.Random(7)
    stems = [[numbers.randrange(5, 500) for _ in range(160)] for _ in range(count // 3)]
    found = []
    for number in range(count):
        stem = stems[number // 3][: numbers.choice((40, 70, 100, 130, 160))]
        found.append(stem + [numbers.randrange(5, 500) for _ in range(numbers.randrange(3, 60))])
    return found


def options(storage: Path | None, **extra: Any) -> dict[str, Any]:
    """Return engine options: a device of 23 blocks, a host of 31 pages, storage of 200."""
    config: dict[str, Any] = {"host_bytes": "1MiB", **extra}
    if storage is not None:
        config["storage"] = {
            "backend": "segments",
            "path": str(storage),
            "max_bytes": "8MiB",
            "segment_bytes": "512KiB",
            "sync_bytes": "64KiB",
        }
    return {
        "num_gpu_blocks_override": 24,
        "enable_prefix_caching": True,
        "kv_transfer_config": transfer(**config),
    }


@contextlib.contextmanager
def driving(model: Path, **engine: Any) -> Iterator[tuple[Any, Any]]:
    from vllm_graft.bench.hicache.prompt_driver import Driver
    from vllm_graft.testing import cpu_engine

    # Storage is read whatever was measured of it, which varies too much on a busy CPU.
    reads_pay = mock.patch.dict(os.environ, {"VLLM_GRAFT_PREFILL_RATE": "10"})
    with reads_pay, cpu_engine(model, **engine) as llm:
        yield llm, Driver(llm)


def expected_tokens(model: Path, wanted: list[Prompt]) -> Tokens:
    with driving(model) as (_, driver):
        answers = [driver.run([prompt], TOKENS)[0] for prompt in wanted]
    return {number: answer.tokens for number, answer in enumerate(answers)}


class Round:
    """Batches of requests, and counts of what went wrong."""

    def __init__(self, llm: Any, driver: Any, expected: Tokens, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._llm, self._driver, self._expected = llm, driver, expected
        self._prompts = prompts()
        self._random = random.Random(seed)

    def batch(self) -> None:
        draw = self._random
        names = {}
        for number in draw.sample(range(len(self._prompts)), draw.randrange(1, 7)):
            names[self._driver.submit(self._prompts[number], TOKENS)] = number
        if draw.random() < 0.15:
            for _ in range(draw.randrange(4)):
                self._take(self._driver.step(), names)
            if names:
                victim = draw.choice(list(names))
                self._driver.abort(victim)
                del names[victim]
                self.counts["aborted"] += 1
        deadline, steps = time.monotonic() + HANG_SECONDS, 0
        while names:
            self._take(self._driver.step(), names)
            steps += 1
            if time.monotonic() > deadline and steps > HANG_STEPS:
                self.counts["hung"] += len(names)
                raise TimeoutError(f"requests hang: {names}, {dict(self.counts)}")
        self._empty()

    def _empty(self) -> None:
        kind = self._random.random()
        if kind < 0.6:
            connector = kind < 0.02
            done = self._llm.reset_prefix_cache(reset_connector=connector)
            self.counts["resets"] += done
            self.counts["connector_resets"] += done and connector

    def _take(self, finished: dict[str, Any], names: dict[str, int]) -> None:
        for name, answer in finished.items():
            number = names.pop(name)
            self.counts["requests"] += 1
            self.counts["cached_tokens"] += answer.cached
            if answer.reason == "error":
                self.counts["errors"] += 1
            elif answer.tokens != self._expected[number]:
                self.counts["wrong"] += 1


def notices_spoilt_pages(llm: Any, driver: Any, expected: Tokens) -> bool:
    """Negative control: overwrite the host pool as a bug could; return whether tokens change."""
    import numpy

    from vllm_graft.testing import model_runner

    wanted = prompts()[:6]
    for prompt in wanted:
        driver.run([prompt], TOKENS)
    driver.settle(0.01)
    driver.forget_device()
    pool = model_runner(llm).kv_connector.kv_connector.worker._pool
    noise = numpy.random.default_rng(0).normal(0, 3, pool.shape.slot_bytes // 4)
    for slot in range(pool.shape.num_slots):
        pool.page(0, slot, pool.shape.slot_bytes)[:] = noise.astype("float32").tobytes()
    answers = [driver.run([prompt], TOKENS)[0].tokens for prompt in wanted]
    return any(tokens != expected[number] for number, tokens in enumerate(answers))


def fault_run(
    model: Path,
    expected: Tokens,
    storage: Path | None,
    count: int,
    seed: int,
    seconds: float = 1e9,
    **extra: Any,
) -> dict[str, int]:
    """Run batches on one engine until ``count`` faults were injected or ``seconds`` have passed."""
    from tests.support.host_cache.engine_faults import injected
    from tests.support.host_cache.faults import Faults

    faults = Faults(0.25, seed, slow_seconds=0.002)
    end = time.monotonic() + seconds
    with injected(faults), driving(model, **options(storage, **extra)) as (llm, driver):
        current = Round(llm, driver, expected, seed)
        try:
            while faults.counts["injected"] < count and time.monotonic() < end:
                current.batch()
            current.counts["blind"] += not notices_spoilt_pages(llm, driver, expected)
        finally:
            found = current.counts + faults.counts
    return dict(found)


def kill_run(
    model: Path,
    expected: Tokens,
    storage: Path,
    count: int,
    seed: int,
    report: Callable[[dict[str, int]], None] = lambda counts: None,
) -> dict[str, int]:
    """Run engines one after the other on the same storage, each killed while it writes."""
    counts: Counter[str] = Counter()
    draw = random.Random(seed)
    for number in range(count):
        ours, theirs = Pipe()
        child = os.fork()
        if child == 0:
            ours.close()
            _victim(theirs, model, expected, storage, seed + number)
        theirs.close()
        try:
            if not ours.poll(START_SECONDS):
                counts["no_start"] += 1
            elif ours.recv() and not ours.poll(2 * HANG_SECONDS):
                counts["hung"] += 1
            else:
                counts.update(ours.recv())
                time.sleep(draw.random() * 0.4)
                counts["kills"] += 1
        except EOFError:
            counts["died"] += 1
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with contextlib.suppress(EOFError, OSError):
            while ours.poll(0):
                counts.update(ours.recv())
        ours.close()
        report(dict(counts))
    return dict(counts)


def _victim(pipe: Connection, model: Path, expected: Tokens, storage: Path, seed: int) -> None:
    """Answer some prompts, report, and go on until killed. Never returns."""
    # The parent counts; vLLM's log, a hundred times over, would hide the counts.
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    if not os.environ.get("SOAK_VERBOSE"):
        os.dup2(quiet, 2)
    try:
        with driving(model, **options(storage)) as (llm, driver):
            pipe.send("ready")
            current = Round(llm, driver, expected, seed)
            for first in (True, False):
                while True:
                    current.batch()
                    counts, current.counts = current.counts, Counter()
                    pipe.send({("" if first else "later_") + k: n for k, n in counts.items()})
                    if first:
                        break
    finally:
        os._exit(1)


def bad(counts: dict[str, int]) -> int:
    names = ("wrong", "later_wrong", "hung", "died", "no_start", "errors", "blind")
    return sum(counts.get(key, 0) for key in names)


def prepare(folder: Path) -> tuple[Path, Tokens]:
    """Make a model and its answers; the engine runs in a child, so that this process can fork."""
    from vllm_graft.testing import write_llama

    model = write_llama(folder / "llama")
    ours, theirs = Pipe()
    child = os.fork()
    if child == 0:
        try:
            theirs.send(expected_tokens(model, prompts()))
        finally:
            os._exit(0)
    theirs.close()
    tokens: Tokens = ours.recv()
    os.waitpid(child, 0)
    return model, tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("faults", "kills"))
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--load", nargs="+", default=["async", "layerwise", "auto"])
    parser.add_argument("--seconds", type=float, default=1e9, help="limit of one engine")
    arguments = parser.parse_args()
    set_up()
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model, expected = prepare(folder)
        if arguments.kind == "kills":
            found = kill_run(
                model, expected, folder / "kv", arguments.count, arguments.seed, _print
            )
            wrong += bad(found)
        else:
            for number, load in enumerate(arguments.load):
                found = fault_run(
                    model,
                    expected,
                    folder / f"kv{number}",
                    arguments.count // len(arguments.load),
                    arguments.seed + number,
                    arguments.seconds,
                    load=load,
                )
                _print({"load": load, **found})
                wrong += bad(found)
    print(f"{wrong} went wrong", flush=True)
    return 1 if wrong else 0


def _print(counts: dict[str, Any]) -> None:
    print(json.dumps(counts), flush=True)


def set_up() -> None:
    """Do what the tests' conftest does, for this file as a program."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from vllm_graft.testing import engine, torchvision_import
    from vllm_graft.testing.interpreter import install as interpreter

    interpreter.install()
    torchvision_import.install()
    engine.set_environment()
    import torch
    from vllm import LLM  # noqa: F401

    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(main())
