"""Runs the mergers of a tower's inner layers on a second stream, beside the blocks that follow.
Qwen3-VL takes features of three inner layers. Each goes through a merger whose result is needed
only at the end of the pass. With small images neither a merger nor a block fills the device."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from vllm_graft.graph_runners.vision.capture.graph_backend import CaptureStream

MOST_ROWS = 1024
"""The largest pass, in patches, with mergers aside; in larger ones blocks fill the device alone."""


@contextmanager
def replaced_forwards(forwards: Sequence[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
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


class SideMergers:
    """The mergers of a tower's inner layers, and the `last` block's, which runs after them."""

    def __init__(self, side_stream: CaptureStream, mergers: Sequence[Any], last: Any) -> None:
        self._side_stream, self._mergers, self._last = side_stream, list(mergers), last
        self._held: list[torch.Tensor] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        forwards = [(merger, self._forward_of(merger.forward)) for merger in self._mergers]
        forwards.append((self._last, self._joining(self._last.forward)))
        with replaced_forwards(forwards):
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
            return self._side_stream.run(lambda: merge(x))

        return forward

    def _joining(self, merge: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: torch.Tensor) -> Any:
            out = merge(x)
            if self._held:
                self._side_stream.join()
                self._held.clear()
            return out

        return forward


def find_side_mergers(
    model: Any, side_stream: Callable[[], CaptureStream | None]
) -> SideMergers | None:
    """The mergers of a model's tower; None if no inner layer has one, or without a second stream.
    `side_stream` gives that stream; it is called only if there are mergers."""
    visual = getattr(model, "visual", None)
    mergers = getattr(visual, "deepstack_merger_list", None)
    last = getattr(visual, "merger", None)
    if not mergers or last is None or (stream := side_stream()) is None:
        return None
    return SideMergers(stream, mergers, last)
