"""What engines and modules do while a test watches: drafts, tokens, launches, waits."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch

from vllm_graft.spec_decode.heads import hot_vocabulary
from vllm_graft.spec_decode.heads.head import DraftHead
from vllm_graft.testing import model_runner

if TYPE_CHECKING:
    from vllm import LLM

Drafted = dict[tuple[str, int], list[int]]


@contextlib.contextmanager
def drafted(llm: Any) -> Iterator[Drafted]:
    """The drafts of each request, by its number and how many tokens of its text were computed."""
    speculator = model_runner(llm).speculator
    stock, found = speculator.propose, {}

    def propose(batch: Any, *args: Any, **kwargs: Any) -> Any:
        num_rejected = args[5]
        lengths = batch.seq_lens[: batch.num_reqs] - num_rejected[: batch.num_reqs]
        drafts = stock(batch, *args, **kwargs)
        if not kwargs.get("dummy_run"):
            for name, length, tokens in zip(batch.req_ids, lengths.tolist(), drafts.tolist()):
                found[name.partition("-")[0], length] = tokens
        return drafts

    speculator.propose = propose
    try:
        yield found
    finally:
        del speculator.propose, speculator


@contextlib.contextmanager
def emitted(llm: Any) -> Iterator[dict[str, list[int]]]:
    """How many tokens each request got in each step that emitted any, by its number."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    stock, found = scheduler.update_from_output, defaultdict(list)

    def update_from_output(scheduled: Any, output: Any) -> Any:
        for name, tokens in zip(output.req_ids, output.sampled_token_ids):
            if tokens:
                found[name.partition("-")[0]].append(len(tokens))
        return stock(scheduled, output)

    scheduler.update_from_output = update_from_output
    try:
        yield found
    finally:
        del scheduler.update_from_output, scheduler


@contextmanager
def proposed(llm: LLM) -> Iterator[list[list[list[int]]]]:
    """Record the drafts of each step inside the ``with`` block, by request, of an engine here."""
    speculator, found = model_runner(llm).speculator, []
    stock = speculator.propose

    def noted(batch: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = stock(batch, *args, **kwargs)
        found.append(tokens[: batch.num_reqs].tolist())
        return tokens

    speculator.propose = noted
    try:
        yield found
    finally:
        del speculator.propose


def wrap(monkeypatch: pytest.MonkeyPatch, *wrapped: tuple[Any, str, Callable[..., Any]]) -> None:
    """Put others in the place of functions; each is given the function, then the arguments."""
    for owner, name, other in wrapped:
        call = functools.partial(other, getattr(owner, name))
        # A method has to be a function.
        monkeypatch.setattr(owner, name, lambda *args, call=call, **more: call(*args, **more))


def count_launches(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, *names: str
) -> dict[str, int]:
    """Let functions of a module count their calls, by name, until the test ends."""
    counts = dict.fromkeys(names, 0)

    def counted(name: str, stock: Callable[..., None]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            counts[name] += 1
            stock(*args, **kwargs)

        return launch

    for name in names:
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return counts


_WAITS = "called a synchronizing CUDA operation"
"""What torch says of an operation that waits."""


@contextmanager
def refused_synchronisations() -> Iterator[None]:
    """Let torch raise where the host waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def synchronisations() -> Iterator[list[str]]:
    """Collect the places that wait for the device, as ``file:line``, once for each time.

    The list is full when the context ends. Torch sees its own operations that wait, such as
    ``item()``, but no events that somebody waits for.
    """
    found: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
            found += [f"{w.filename}:{w.lineno}" for w in caught if _WAITS in str(w.message)]


def choose_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose hot tokens every other step, and use them whatever their coverage."""
    for name, value in (("PERIOD", 2), ("LATE", 1), ("COVERAGE", 0.0)):
        monkeypatch.setattr(hot_vocabulary, name, value)


def narrowed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Whether each pass of a draft's head is over hot tokens alone, and over the root's row.

    They are chosen often.
    """
    choose_often(monkeypatch)
    found: list[tuple[bool, bool]] = []

    def top(original: Any, head: DraftHead, *args: Any, narrow: bool = False, **kw: Any) -> Any:
        logp, tokens = original(head, *args, narrow=narrow, **kw)
        found.append((narrow, "out" in kw))
        if narrow:
            assert head.learned is not None
            assert torch.isin(tokens, head.learned.target_ids).all()
        return logp, tokens

    wrap(monkeypatch, (DraftHead, "top", top))
    return found
