"""The engine core's side of `graft.learn.follow`: published heads are swapped in between two steps,
and out again if they yield less."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_graft.base.errors import ConfigError, GraftError
from vllm_graft.base.log import logger, warning_once
from vllm_graft.base.metric import Numbers
from vllm_graft.base.options import flag
from vllm_graft.base.values import reason_of, shown
from vllm_graft.learn.learn_config import NAME, LearnConfig
from vllm_graft.learn.publications import (
    KEPT,
    REFUSED,
    Publication,
    Publications,
    digest,
    weights_of,
)
from vllm_graft.learn.yields import PARTS, Window, Yields, is_worse
from vllm_graft.seams.wrap import around

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

LOOK_SECONDS = 2.0
"""Between two looks at the folder, by a thread, and between two at what that has found."""

START_SECONDS = 600.0
"""Within which the head of a start has to be read."""

FLAG = flag(NAME, "follow")

BASE = "0"
"""Name of the head of the start, where others have their `Publication.id`."""

Ask = Callable[..., list[tuple[Any, str]]]
"""Calls a method of `vllm_graft.spec_decode.heads.head_weights.HeadWeights` in all workers."""


class Follower:
    """Decides which head drafts. Its methods are called by the engine's thread, but for `look`, and
    none of them touches a file but `begin`.

    Args:
        shelf: where heads are published.
        base: `digest` of the head that the workers have loaded.
        ask: calls a method in all workers, between two steps.
        size: trees of a window.
    """

    def __init__(
        self,
        shelf: Publications,
        base: str,
        ask: Ask,
        size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shelf, self._base, self._order, self._clock = shelf, base, ask, clock
        self._serving: Publication | None = None
        self._before: Publication | None = None
        self._reading: Publication | None = None
        self._newest: Publication | None = None
        # Heads that have served, or that were refused.
        self._done = set[str]()
        # What trees yielded before the last swap, if that is judged yet, and since.
        self._earlier: Window | None = None
        self._recent, self._size = Window(size), size
        self._told = 0.0
        self._swaps = self._rollbacks = self._unfit = 0
        self._due, self._failed = 0.0, False
        self._verdicts = list[tuple[Publication, str]]()

    def _ask(self, *args: Any) -> list[Any]:
        """What all workers say. Raises `RuntimeError` if one of them failed."""
        found = self._order(*args)
        for _, why in found:
            if why:
                raise RuntimeError(why)
        return [each for each, _ in found]

    # Heads

    def begin(self, base: str) -> None:
        """Wait for the workers, which read the head of the start, the file `base`, and serve with
        the newest one that was kept. Raises `ConfigError` if the first can't be read."""
        if problem := self._patiently(BASE):
            raise ConfigError(
                f"{FLAG} asks for other weights of the head, but {shown(base)} can't be read as "
                f"vLLM does: {problem}. Serve with a head that `vllm-graft train` made."
            )
        try:
            kept = [each for each in self._shelf.each(self._base) if each.verdict == KEPT]
        except OSError as error:
            warning_once(f"{FLAG}: {reason_of(error)}")
            kept = []
        for each in kept[-1:]:
            self._ask("read", each.id, str(each.weights))
            if problem := self._patiently(each.id):
                self._unfits(each, problem)
            else:
                self._swap(each)
                self._keep_one()
                logger.info("%s: the server begins with %s.", FLAG, _told(each))

    def _patiently(self, head: str) -> str:
        """What workers say of a head, once they have read it."""
        until = self._clock() + START_SECONDS
        while (problem := self._problem(head)) is None and self._clock() < until:
            time.sleep(0.05)
        return "it is not read yet" if problem is None else problem

    def _problem(self, head: str) -> str | None:
        """What one of the workers says of a head: empty if all can have it, None if one reads."""
        found = self._ask("problem", head)
        return next(filter(None, found), None if None in found else "")

    def step(self) -> None:
        """Do what is due before a step. What fails leaves the head that drafts. Raises `GraftError`
        if ranks may have different ones."""
        if self._failed or (now := self._clock()) < self._due:
            return
        self._due = now + LOOK_SECONDS
        try:
            self._act()
        except GraftError:
            raise
        except Exception as error:
            self._failed = True
            logger.warning("%s: no head is swapped any more: %s", FLAG, reason_of(error))

    def _act(self) -> None:
        if self._earlier is not None:
            self._judge(self._earlier)
        elif self._reading is not None:
            self._try(self._reading)
        elif (new := self._newest) is not None and self._may_follow(new):
            self._reading = new
            self._ask("read", new.id, str(new.weights))

    def _may_follow(self, new: Publication) -> bool:
        """Whether a head is a new one, and enough is known to compare it with the one that is
        there."""
        serving = self._serving
        if new.id in self._done or (serving is not None and _is_older(new, serving)):
            return False
        return self._recent.sum.trees * PARTS >= self._size

    def _try(self, new: Publication) -> None:
        problem = self._problem(new.id)
        if problem is None:
            return
        self._reading = None
        if problem:
            self._unfits(new, problem)
            return
        self._before, self._earlier = self._serving, self._recent
        began = time.perf_counter()
        self._swap(new)
        took = time.perf_counter() - began
        self._swaps += 1
        self._recent = Window(self._size)
        self._told = self._earlier.sum.mean
        logger.info(
            "%s: %s drafts from now on. The swap took %.1f ms. Trees yielded %.3f tokens before.",
            FLAG,
            _told(new),
            1000 * took,
            self._told,
        )

    def _judge(self, earlier: Window) -> None:
        before, after, serving = earlier.sum, self._recent.sum, self._serving
        worse = is_worse(after, before, self._size)
        if worse is None or serving is None:
            return
        self._earlier = None
        found = (
            f"{after.mean:.3f} tokens per tree, {before.mean:.3f} before; {after.over(before):.3f} "
            "times those of trees of the same sizes"
        )
        if worse:
            self._refuse(serving)
            self._swap(self._before)
            self._rollbacks += 1
            self._recent = earlier
            logger.warning("%s: head %d is out again: %s.", FLAG, serving.number, found)
        else:
            self._verdicts.append((serving, KEPT))
            logger.info("%s: head %d stays: %s.", FLAG, serving.number, found)
        self._keep_one()

    def _swap(self, to: Publication | None) -> None:
        """Let all workers draft with a head; if one of them fails, all go back, and `RuntimeError`
        says why. Raises `GraftError` if ranks may have different heads."""
        try:
            self._ask("swap", _id(to))
        except RuntimeError as error:
            # Some ranks have the new head, and one maybe a part of it.
            found = self._order("swap", _id(self._serving))
            if len(found) > 1 and (again := next((why for _, why in found if why), "")):
                raise GraftError(
                    f"{FLAG}: head {_number(to)} could not be swapped in ({error}), and head "
                    f"{_number(self._serving)} not back ({again}). Tensor-parallel ranks may draft "
                    "different trees, and their answers would be wrong: start the server again."
                ) from None
            raise
        self._serving = to
        self._done.add(_id(to))

    def _keep_one(self) -> None:
        """Have the workers forget all heads but the one that serves."""
        self._ask("keep", _id(self._serving))

    def _unfits(self, new: Publication, problem: str) -> None:
        self._unfit += 1
        self._refuse(new)
        self._keep_one()
        logger.warning("%s: head %d is not used: %s.", FLAG, new.number, problem)

    def _refuse(self, head: Publication) -> None:
        # The folder may be one that can't be written.
        self._done.add(head.id)
        self._verdicts.append((head, REFUSED))

    # What is counted

    def count(self, scheduler_output: Any, model_runner_output: Any) -> None:
        """Count a step's trees, and the tokens that they yielded."""
        drafts = scheduler_output.scheduled_spec_decode_tokens
        sampled = model_runner_output.sampled_token_ids
        if not drafts or not sampled:
            return
        rows, step = model_runner_output.req_id_to_index, Yields()
        for name, nodes in drafts.items():
            if (row := rows.get(name)) is not None and (tokens := len(sampled[row])):
                step.add(len(nodes), 1, tokens)
        self._recent.add(step)

    def numbers(self) -> Numbers:
        """What was counted since the start, by the names of the part's metrics."""
        serving = self._serving
        return {
            "head": _number(serving),
            "head_trained_seconds": 0.0 if serving is None else serving.facts.seconds,
            "head_swaps": self._swaps,
            "head_rollbacks": self._rollbacks,
            "unfit_heads": self._unfit,
            "head_yield_before": self._told,
            "head_yield": self._recent.sum.mean,
        }

    # The folder

    def look(self) -> None:
        """See what is new in the folder, and note verdicts there. Raises `OSError`, as files do."""
        found = [each for each in self._shelf.each(self._base) if each.verdict != REFUSED]
        self._newest = found[-1] if found else None
        while self._verdicts:
            with contextlib.suppress(FileNotFoundError):  # It is just being removed.
                self._shelf.judge(*self._verdicts[0])
            del self._verdicts[0]


def watch(follower: weakref.ref[Follower]) -> None:
    """Let a follower look again and again, as long as its engine is there."""
    while (made := follower()) is not None:
        try:
            made.look()
        except Exception as error:
            warning_once(f"{FLAG}: {reason_of(error)}")
        del made
        time.sleep(LOOK_SECONDS)


def _number(head: Publication | None) -> int:
    return 0 if head is None else head.number


def _id(head: Publication | None) -> str:
    return BASE if head is None else head.id


def _is_older(one: Publication, other: Publication) -> bool:
    """Whether a head came first. Numbers begin again in an emptied folder, times in a copy."""
    return one.number < other.number and one.written <= other.written


def _told(head: Publication) -> str:
    facts = head.facts
    return (
        f"head {head.number}, trained for {facts.seconds:.0f} s (acceptance length "
        f"{facts.after:.2f} on held-out texts, {facts.before:.2f} of head {facts.trained_from})"
    )


def follow(core: EngineCore, config: LearnConfig) -> Follower:
    """Let an engine core, whose workers have captured their graphs, follow a folder. Raises
    `ConfigError` if its head can't have other weights."""
    from vllm_graft.spec_decode.heads import head_weights

    assert config.follow is not None
    draft = core.vllm_config.speculative_config.draft_model_config
    base = weights_of(draft.model, draft.revision)
    if base is None:
        raise ConfigError(
            f"{FLAG} asks for other weights of the head, but {shown(draft.model)} has no "
            "model.safetensors: serve with a head that `vllm-graft train` made."
        )
    shelf = Publications(Path(config.follow).absolute())

    core.collective_rpc(head_weights.attach, args=(BASE, str(base)))

    def ask(*args: Any) -> list[tuple[Any, str]]:
        found: list[tuple[Any, str]] = core.collective_rpc(head_weights.order, args=args)
        return found

    made = Follower(shelf, digest(base), ask, config.follow_trees)
    made.begin(str(base))

    # Only this scheduler is changed: others in the process may have other configurations.
    @around(core.scheduler, "schedule")
    def then_schedule(stock: Any, *args: Any, **kwargs: Any) -> Any:
        # All of the step before has been sent to the workers, which take orders in turn.
        made.step()
        return stock(*args, **kwargs)

    @around(core.scheduler, "update_from_output")
    def then_count(stock: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        made.count(scheduler_output, model_runner_output)
        return stock(scheduler_output, model_runner_output)

    threading.Thread(target=watch, args=(weakref.ref(made),), daemon=True).start()
    return made
