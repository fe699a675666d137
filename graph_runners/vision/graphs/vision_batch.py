"""The images or videos that the engine hands over at once, and the passes that encode them."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from vllm_graft.graph_runners.vision.towers.tower import Inputs, Item, Tower


@dataclass(frozen=True)
class VisionBatch:
    """Inputs of one encoder step, its items, all of one modality, and the patches of all."""

    inputs: Inputs
    items: Sequence[Item]
    rows: int

    @classmethod
    def read(cls, tower: Tower, inputs: Inputs) -> Self:
        items = tower.items(inputs)
        return cls(inputs, items, sum(item.rows for item in items))

    @property
    def indices(self) -> range:
        return range(len(self.items))

    def pick(self, indices: Iterable[int]) -> list[Item]:
        return [self.items[index] for index in indices]


Outputs = list[torch.Tensor]
"""The embeddings of each item, ``[tokens, hidden]``."""


class EagerPass(NamedTuple):
    """A measured pass of the model without graphs: what a graph is compared with. `peak` is the
    bytes that it needed beyond those in use."""

    batch: VisionBatch
    indices: Sequence[int]
    outputs: Outputs
    seconds: float
    peak: int


LayoutKey = tuple[Hashable, int]
"""A layout and a number of items: names an exact graph."""


@dataclass(frozen=True)
class ExactReplay:
    """A replay of the exact graph `key`. `indices` are places of the items in the batch, in the
    order of the graph's rows, and `rows` their patches."""

    indices: tuple[int, ...]
    rows: int
    key: LayoutKey

    def __str__(self) -> str:
        return str(self.key)


@dataclass(frozen=True)
class PaddedReplay:
    """A replay of the padded graph of `bucket` patches; padding fills what the items leave.
    `indices` and `rows` are those of the items, as in `ExactReplay`."""

    indices: tuple[int, ...]
    rows: int
    bucket: int

    def __str__(self) -> str:
        return str(self.bucket)


Replay = ExactReplay | PaddedReplay
