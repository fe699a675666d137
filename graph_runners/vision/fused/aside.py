"""Runs the mergers of a tower's inner layers on a second stream, beside the blocks that follow.

Qwen3-VL takes features of three inner layers. Each goes through a merger whose result is needed
only at the end of the pass. With small images neither a merger nor a block fills the device, so
they can run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from vllm_graft.graph_runners.vision.capture.graph_backend import Beside

MOST_ROWS = 1024
"""The largest pass, in patches, with mergers aside.

In larger passes the blocks fill the device alone, and mergers beside them only need more memory.
"""


class Aside:
    """The mergers of one tower.

    Args:
        beside: the second stream.
        mergers: the mergers of the inner layers.
        last: the merger of the last block, which runs after all others.
    """

    def __init__(self, beside: Beside, mergers: Sequence[Any], last: Any) -> None:
        self._beside, self._mergers, self._last = beside, list(mergers), last
        self._held: list[torch.Tensor] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Run the mergers beside the blocks in the body."""
        forwards = [(merger, self._forward_of(merger.forward)) for merger in self._mergers]
        forwards.append((self._last, self._joining(self._last.forward)))
        with in_place(forwards):
            try:
                yield
            finally:
                self._held.clear()

    def _forward_of(self, merge: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: torch.Tensor) -> Any:
            if x.shape[0] > MOST_ROWS:
                return merge(x)
            # The allocator does not know that the second stream reads `x`, and would give its
            # memory to the next block.
            self._held.append(x)
            return self._beside.run(lambda: merge(x))

        return forward

    def _joining(self, merge: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: torch.Tensor) -> Any:
            out = merge(x)
            if self._held:
                self._beside.join()
                self._held.clear()
            return out

        return forward


def find_aside(model: Any, beside: Callable[[], Beside | None]) -> Aside | None:
    """The mergers of a model's tower.

    Args:
        model: the loaded model.
        beside: gives a second stream; called only if there are mergers.

    Returns:
        None if no inner layer has a merger, or if there is no second stream.
    """
    visual = getattr(model, "visual", None)
    mergers = getattr(visual, "deepstack_merger_list", None)
    last = getattr(visual, "merger", None)
    if not mergers or last is None or (where := beside()) is None:
        return None
    return Aside(where, mergers, last)


@contextmanager
def in_place(forwards: Sequence[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    """Replace each module's ``forward`` in the body."""
    before = [vars(module).get("forward") for module, _ in forwards]
    for module, forward in forwards:
        # `setattr` would be slow, as a module first searches its parameters and children.
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for (module, _), own in zip(forwards, before, strict=True):
            del vars(module)["forward"]
            if own is not None:
                vars(module)["forward"] = own
