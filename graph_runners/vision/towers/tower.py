"""What the runner has to know of a vision encoder, and nothing about graphs.

A *tower* turns the multimodal keyword arguments of a batch (``inputs``) into embeddings. Items of a
batch, images or videos, do not see each other: a batch may be cut anywhere. What an item's
embeddings depend on is either its *layout*, host values such as a grid, or its *data*, tensors such
as pixels. A graph is captured for a sequence of layouts; a replay copies data in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_graft.graph_runners.vision.fused import UNKNOWN_BLOCKS

if TYPE_CHECKING:
    import torch

    from vllm_graft.graph_runners.vision.capture.graph_backend import Beside

Inputs = Mapping[str, Any]
Pieces = dict[str, "list[torch.Tensor]"]
Buffers = dict[str, "torch.Tensor"]


@dataclass(frozen=True)
class Item:
    """One image or video.

    Attributes:
        layout: all that the embeddings depend on besides the data: modality, grid, and the shape
            and dtype of the data. Two items of one layout are run by the same graph.
        rows: patches, the measure of the work.
    """

    layout: Hashable
    rows: int


class Tower(ABC):
    """One vision encoder. Its methods run in the worker, under ``torch.inference_mode``."""

    modalities: tuple[str, ...] = ("image",)
    unit = 0
    """Rows of an item are a multiple of it; 0 for a tower without buckets."""
    fused = ""
    """Which small operators of the blocks `forward` runs as fewer kernels, in words."""
    why_not_fused = UNKNOWN_BLOCKS
    """Where there are none."""

    def fuse(self, beside: Callable[[], Beside | None], agree: Callable[[bool], bool]) -> None:
        """Fuse what keeps its bits. Called before the first capture, where captures run.

        Args:
            beside: takes the means to run something beside something else from the budget.
            agree: whether it is so on all ranks that share the tower.
        """
        self.unfuse(UNKNOWN_BLOCKS)

    def unfuse(self, why: str) -> None:
        """Fuse nothing in what is captured from now on."""
        self.fused, self.why_not_fused = "", why

    def decline(self, inputs: Inputs) -> str | None:
        """Why these inputs cannot be served by graphs, in a word to count by; None if they can.

        Embeddings that the user has computed have to be declined: no tower runs for them.
        """
        return "precomputed" if any("embeds" in name for name in inputs) else None

    @abstractmethod
    def items(self, inputs: Inputs) -> list[Item]:
        """The items in order. Must not wait for the device: runs in each encoder step."""

    @abstractmethod
    def data(self, inputs: Inputs, indices: Sequence[int]) -> Pieces:
        """The tensors of these items, by the name of the buffer that they are copied to.

        The pieces of a buffer follow each other along its first dimension, in the order of
        `indices`; they are views where possible.
        """

    def constants(self, items: Sequence[Item]) -> Buffers:
        """Tensors that follow from the layouts alone, by name: positions, segment offsets.

        A tensor without dimensions on the host is read by kernels as a Python number, which a
        graph freezes.
        """
        return {}

    @abstractmethod
    def forward(self, buffers: Buffers) -> Any:
        """The region to capture: data and constants in, tensors (any pytree of them) out.

        No wait for the device, no value that is read on the host from a tensor of the device.
        """

    @abstractmethod
    def split(
        self, output: Any, inputs: Inputs, indices: Sequence[int], items: Sequence[Item]
    ) -> list[torch.Tensor]:
        """The embeddings of each item, ``[tokens, hidden]``, out of what `forward` returned.

        Must equal what the model's ``embed_multimodal`` gives for these items.
        """

    @abstractmethod
    def eager(self, inputs: Inputs, indices: Sequence[int]) -> list[torch.Tensor]:
        """The embeddings of these items as the model computes them without graphs."""

    def eager_fused(self, inputs: Inputs, indices: Sequence[int]) -> list[torch.Tensor] | None:
        """What `eager` gives, with fused blocks and without graphs; None if nothing is fused."""
        return None

    def startup(self) -> list[Inputs]:
        """Inputs whose layouts are captured when the engine starts, each as one exact graph."""
        return []

    def sample(self, rows: int) -> Inputs | None:
        """Inputs of at most so many rows, to measure and verify buckets with before any came.

        They should leave a tail to be padded: a bucket is kept if it is faster with them. Needed
        where `padding` is given.
        """
        return None

    def padding(self, like: Item, rows: int) -> list[Item] | None:
        """Items that hold exactly so many rows, to fill a batch up; None if there are none.

        Their segments are short. A tower with buckets gives `unit`, `sample` and `bounds`, too.
        """
        return None

    def bounds(self, rows: int) -> Buffers:
        """For each host number in `constants`: what no batch of so many rows exceeds."""
        return {}
