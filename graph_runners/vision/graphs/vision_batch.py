"""The images or videos that the engine hands over at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_graft.graph_runners.vision.towers.tower import Inputs, Item, Tower


@dataclass(frozen=True)
class VisionBatch:
    """Inputs of one encoder step; all items have the same modality.

    Attributes:
        inputs: keyword arguments of the model's ``embed_multimodal``.
        items: the images or videos, in the order of the inputs.
        rows: patches of all items.
    """

    inputs: Inputs
    items: Sequence[Item]
    rows: int

    @classmethod
    def read(cls, tower: Tower, inputs: Inputs) -> VisionBatch:
        """The batch that these inputs are for `tower`."""
        items = tower.items(inputs)
        return cls(inputs, items, sum(item.rows for item in items))

    @property
    def indices(self) -> range:
        """The places of all items."""
        return range(len(self.items))

    def pick(self, indices: Iterable[int]) -> list[Item]:
        """The items at these places."""
        return [self.items[index] for index in indices]
