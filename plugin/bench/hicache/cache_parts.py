"""The parts of the benchmark, which every arm's engine is asked for alike."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_graft.bench.common.arm import percentile
from vllm_graft.bench.common.report import BenchmarkError
from vllm_graft.bench.common.serve_flags import Serving
from vllm_graft.bench.hicache.prompt_driver import Driver, random_prompt
from vllm_graft.bench.hicache.sessions import ClosedLoad, OpenLoad, Sessions, length_between

if TYPE_CHECKING:
    from vllm import LLM


Figures = dict[str, float]

COUNTED = (
    *("loads_layerwise", "loads_async", "recomputed", "unfit_pages"),
    *("load_bytes", "load_seconds", "store_bytes", "store_seconds"),
)
SLOTS = ("pages", "free_pages")


def _size(default: float, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Sizes:
    """The amount of work, with the help of each flag."""

    vocab: int = _size(8000, "prompts are random token ids in [16, vocab)")
    block: int = _size(0, "tokens of a block of the device's K/V cache; 0: as vLLM chooses")
    gpu_tokens: int = _size(28_672, "tokens that the K/V cache of the device holds")
    host_gib: float = _size(16.0, "GiB of the host cache, ours and vLLM's")
    suffix: int = _size(512, "new tokens behind a prefix that the host has")
    requests: int = _size(32, "requests that decode at a time")
    prompt: int = _size(512, "tokens of their prompts")
    tokens: int = _size(256, "tokens of their answers")
    sessions: int = _size(64, "sessions at a time, with more K/V than the device holds")
    turns: int = _size(4, "turns of a session")
    turn_tokens: int = _size(384, "tokens of the user per turn")
    reply: int = _size(64, "tokens of an answer in a session")
    session_seconds: float = _size(60.0, "longest time of a round of sessions")
    rate: float = _size(2.0, "turns a second of an open load, all sessions together")
    sticky: float = _size(0.5, "share of its turns that follow the last answer; others are of any")
    history: int = _size(8192, "least tokens of a session's first turn in an open load")
    history_max: int = _size(32_768, "most tokens of it; each octave between is as likely")

    @property
    def longest(self) -> int:
        """Most tokens that a session of an open load has in the end."""
        return self.history_max + (self.turns - 1) * self.turn_tokens + self.turns * self.reply


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each size."""
    for each in fields(Sizes):
        flag, text = "--" + each.name.replace("_", "-"), each.metadata["help"]
        parser.add_argument(flag, type=type(each.default), default=each.default, help=text)


def read_sizes(arguments: argparse.Namespace) -> Sizes:
    """The sizes that the arguments ask for."""
    return Sizes(**{each.name: getattr(arguments, each.name) for each in fields(Sizes)})


Talk = list[list[int]]
"""The token ids of each turn of a user."""


def read_talks(file: Path | None, given: Serving, sizes: Sizes) -> list[Talk]:
    """The users' turns of as many conversations as there are sessions; none without a file. Raises
    `BenchmarkError` if the file can't be read as ShareGPT's, or has no conversation."""
    if file is None:
        return []
    from vllm.benchmarks.datasets import ShareGPTDataset

    tokenizer = given.tokenizer
    try:
        # Those of one turn are left out there.
        entries = ShareGPTDataset(dataset_path=str(file)).data or []
        said = [
            [turn["value"] for turn in entry["conversations"] if turn["from"] in ("human", "user")]
            for entry in entries[: sizes.sessions]
        ]
        talks = [
            [tokenizer.encode(text)[: sizes.turn_tokens] for text in texts if text]
            for texts in said
        ]
    except Exception as error:  # Of JSON, and of another form.
        raise BenchmarkError(
            f"--dataset {file} can't be read: {type(error).__name__}: {error}. Give a JSON file of "
            'conversations as ShareGPT\'s: [{"conversations": [{"from": "human", "value": "..."}, '
            '{"from": "gpt", "value": "..."}]}]'
        ) from None
    found = [talk for talk in talks if talk]
    if not found:
        raise BenchmarkError(f"--dataset {file} has no conversation with a user's turn.")
    return found


class Parts:
    """An engine that is sent the name of a part, the number of a round, and a size. Each round has
    prompts of its own. The answer is figures by name, the one to compare by first. The users of
    sessions say `talks`, or random tokens without any. A `driver` has its own clock."""

    def __init__(
        self, llm: LLM, sizes: Sizes, talks: Sequence[Talk] = (), driver: Driver | None = None
    ) -> None:
        self._llm, self._sizes, self._talks = llm, sizes, talks
        self._driver = driver or Driver(llm)

    def __call__(self, wish: tuple[str, int, int]) -> Figures:
        name, number, size = wish
        measured: Figures = getattr(self, name)(number, size)
        return measured

    def first_token(self, number: int, prefix: int) -> Figures:
        """Time a prompt whose first `prefix` tokens the host alone has."""
        sizes, driver = self._sizes, self._driver
        known = self._prompt(f"prefix{prefix}-{number}", prefix)
        before = self._counted()
        driver.run([known + self._prompt(f"a{number}", sizes.suffix)], 1)
        driver.settle()
        driver.forget_device()
        (answer,) = driver.run([known + self._prompt(f"b{number}", sizes.suffix)], 1)
        driver.settle(0.02)
        found = {"first_token_ms": 1e3 * answer.ttft, "cached": float(answer.cached)}
        found["slots"] = sum(self._counted(SLOTS).values())
        return found | self._since(before)

    def decode(self, number: int, requests: int) -> Figures:
        """Tokens per second from when all requests have their first, while K/V is written back."""
        sizes, driver = self._sizes, self._driver
        for i in range(requests):
            driver.submit(self._prompt(f"decode{number}-{i}", sizes.prompt), sizes.tokens)
        while driver.waiting_for_first:
            driver.step()
        began, emitted = time.perf_counter(), driver.emitted
        while driver.busy:
            driver.step()
        seconds = time.perf_counter() - began
        driver.settle()
        return {"tokens_per_second": (driver.emitted - emitted) / seconds}

    def load(self, number: int, sessions: int) -> Figures:
        """Turns per second of all sessions at once; each sends its next turn behind its answer."""
        seconds, firsts, found = self._converse(number, sessions, ClosedLoad(sessions))
        return {"turns_per_second": len(firsts) / seconds, **found}

    def open_load(self, number: int, sessions: int) -> Figures:
        """First tokens while turns of sessions with long histories come at random times."""
        sizes = self._sizes
        load = OpenLoad(sessions, sizes.rate, sizes.sticky, f"open{number}")
        _, firsts, found = self._converse(number, sessions, load)
        return {"first_token_ms": percentile(firsts or [0.0], 0.5), **found}

    def _converse(
        self, number: int, sessions: int, load: ClosedLoad
    ) -> tuple[float, list[float], Figures]:
        """Let all sessions talk, from empty caches on, for at most the seconds of `Sizes`. Returns
        the seconds, the milliseconds to each first token, and figures of both loads."""
        driver, sizes = self._driver, self._sizes
        driver.forget_device(connector=True)
        opens = isinstance(load, OpenLoad)
        talk = Sessions(load, partial(self._said, number, opens), sizes.turns, sizes.reply)
        before, began, emitted = self._counted(), driver.now(), driver.emitted
        talk.run(driver, sessions, began + sizes.session_seconds)
        seconds = driver.now() - began
        tokens = driver.emitted - emitted
        driver.abort_all()
        later = [answer for turn, answer in talk.answers if turn]
        prompts = sum(len(answer.prompt) for answer in later)
        firsts = [1e3 * answer.ttft for _, answer in talk.answers]
        return (
            seconds,
            firsts,
            {
                "first_token_p99_ms": percentile(firsts or [0.0], 0.99),
                "hit_rate": sum(answer.cached for answer in later) / max(1, prompts),
                "tokens_per_second": tokens / seconds,
                "errors": float(sum(answer.reason != "length" for _, answer in talk.answers)),
                **self._since(before),
            },
        )

    def _said(self, number: int, opens: bool, session: int, turn: int) -> list[int]:
        """What a user says in a round, of which no other round has a word without a dataset."""
        if self._talks and not opens:
            talk = self._talks[session % len(self._talks)]
            return talk[turn % len(talk)]
        sizes, seed = self._sizes, f"session{number}-{session}-{turn}"
        length = sizes.turn_tokens
        if opens and not turn:
            length = length_between(sizes.history, sizes.history_max, seed)
        return self._prompt(seed, length)

    def _counted(self, names: Sequence[str] = COUNTED) -> Figures:
        """Our connector's metrics of these names; empty for the other arms."""
        prefix = "vllm:graft_hicache_"
        return {
            name: float(getattr(metric, "value", 0))
            for metric in self._llm.get_metrics()
            if (name := metric.name.removeprefix(prefix)) in names
        }

    def _since(self, before: Figures) -> Figures:
        return {name: value - before.get(name, 0.0) for name, value in self._counted().items()}

    def _prompt(self, seed: str, length: int) -> list[int]:
        return random_prompt(seed, length, self._sizes.vocab)
