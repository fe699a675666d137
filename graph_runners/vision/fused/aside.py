"""Mergers of a tower's inner layers, run beside the blocks that follow.

Qwen3-VL takes features of three of its layers, each through a merger of its own that nothing but
the end of the pass waits for. Where images are small, neither it nor a block fills the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from vllm_graft.graph_runners.vision.capture.graph_backend import Beside

MOST_ROWS = 1024
"""Patches of a pass: above, blocks fill the device, and mergers beside them want memory."""


class Aside:
    """The mergers of one tower.

    Args:
        beside: where they run.
        mergers: of the inner layers.
        last: the merger of the last block, which is run after all of them.
    """

    def __init__(self, beside: Beside, mergers: Sequence[Any], last: Any) -> None:
        self._beside, self._mergers, self._last = beside, list(mergers), last
        self._held: list[torch.Tensor] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Mergers run beside blocks in here."""
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
            # The allocator knows nothing of the other stream: the next block would write there.
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
    """The mergers of a model's tower; None if no inner layer has one, or nothing runs beside.

    Args:
        model: loaded.
        beside: is asked for where there are mergers.
    """
    visual = getattr(model, "visual", None)
    mergers = getattr(visual, "deepstack_merger_list", None)
    last = getattr(visual, "merger", None)
    if not mergers or last is None or (where := beside()) is None:
        return None
    return Aside(where, mergers, last)


@contextmanager
def in_place(forwards: Sequence[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    """Each module's own ``forward`` is another in here."""
    before = [vars(module).get("forward") for module, _ in forwards]
    for module, forward in forwards:
        # Not by `setattr`, which a module looks through parameters and children for.
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for (module, _), own in zip(forwards, before, strict=True):
            del vars(module)["forward"]
            if own is not None:
                vars(module)["forward"] = own
