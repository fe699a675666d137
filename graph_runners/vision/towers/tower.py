"""What the runner has to know of a vision encoder, and nothing about graphs.

A *tower* turns the multimodal keyword arguments of a batch (``inputs``) into embeddings. The items
of a batch do not attend to each other, so it may be cut anywhere. The embeddings of an item depend
on its *layout*, which is host values such as a grid, and on its *data*, which is tensors such as
pixels. A graph is captured for given layouts; a replay copies data in."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_graft.graph_runners.vision.capture.graph_backend import CaptureStream
from vllm_graft.graph_runners.vision.fused import UNKNOWN_BLOCKS

Inputs = Mapping[str, Any]
"""Keyword arguments of the model's ``embed_multimodal``."""

Pieces = dict[str, list[torch.Tensor]]
"""The data of some items, by the name of the buffer that they are copied to."""

Buffers = dict[str, torch.Tensor]
"""Tensors by name."""


@dataclass(frozen=True)
class Item:
    """One image or video. `layout`: all that the embeddings depend on besides the data: modality,
    grid, and the shape and dtype of the data. The same graph serves all items of one layout.
    `rows`: patches, which measure the work."""

    layout: Hashable
    rows: int


class Tower(ABC):
    """One vision encoder. Its methods run in the worker, under ``torch.inference_mode``."""

    modalities: tuple[str, ...] = ("image",)
    unit = 0
    """The rows of each item are a multiple of this; 0 for a tower without buckets."""
    fused = ""
    """The operators of the blocks that `forward` runs as fused kernels, in words."""
    why_not_fused = UNKNOWN_BLOCKS
    """The reason, if there are none."""

    def fuse(
        self, side_stream: Callable[[], CaptureStream | None], agree: Callable[[bool], bool]
    ) -> None:
        """Fuse the operators that keep their bits.

        The runner calls this once, before the first capture, on the stream of captures.
        `side_stream`: gives a second stream, whose memory is taken from the budget. `agree`: tells
        whether all ranks that share the tower say yes."""
        self.unfuse(UNKNOWN_BLOCKS)

    def unfuse(self, why: str) -> None:
        """Fuse nothing in the graphs that are captured from now on; `why` is kept."""
        self.fused, self.why_not_fused = "", why

    def decline(self, inputs: Inputs) -> str | None:
        """Why graphs cannot serve these inputs, in a word to count by; None if they can. A tower
        has to decline embeddings that the user has computed, as no encoder runs for them."""
        return "precomputed" if any("embeds" in name for name in inputs) else None

    @abstractmethod
    def items(self, inputs: Inputs) -> list[Item]:
        """The items in the order of the inputs. It runs in each step, and must not wait for a
        device."""

    @abstractmethod
    def data(self, inputs: Inputs, indices: Sequence[int]) -> Pieces:
        """The tensors of these items, by the name of the buffer that they are copied to. The pieces
        of a buffer follow each other along its first dimension, in the order of `indices`. They
        should be views where possible."""

    def constants(self, items: Sequence[Item]) -> Buffers:
        """Tensors that follow from the layouts alone, by name: positions, segment offsets. A host
        tensor without dimensions is a number for the host, which a graph freezes."""
        return {}

    @abstractmethod
    def forward(self, buffers: Buffers) -> Any:
        """The region to capture, of data and constants by name; it returns a pytree of tensors. It
        must neither wait for the device nor read a device value on the host."""

    @abstractmethod
    def split(
        self, output: Any, inputs: Inputs, indices: Sequence[int], items: Sequence[Item]
    ) -> list[torch.Tensor]:
        """The embeddings ``[tokens, hidden]`` of each item of `indices`; views are allowed. They
        must equal those of ``embed_multimodal``. `output` is what `forward` returned for these
        items, and `inputs` and `items` are those of the whole batch."""

    @abstractmethod
    def eager(self, inputs: Inputs, indices: Sequence[int]) -> list[torch.Tensor]:
        """The embeddings of these items as the model computes them without graphs."""

    def eager_fused(self, inputs: Inputs, indices: Sequence[int]) -> list[torch.Tensor] | None:
        """Like `eager`, but with fused blocks; None if nothing is fused."""
        return None

    def startup(self) -> list[Inputs]:
        return []

    def sample(self, rows: int) -> Inputs | None:
        """Inputs of at most `rows` patches, to measure and verify buckets at the start. They should
        leave a tail to be padded, as a bucket is kept if it is faster with them. A tower that has
        `padding` has to give them."""
        return None

    def padding(self, like: Item, rows: int) -> list[Item] | None:
        """Items of exactly `rows` patches that fill a batch up; None if there are none. Their
        segments are short. A tower with buckets also gives `unit`, `sample` and `bounds`. `like` is
        an item of the batch, for its modality and dtype."""
        return None

    def bounds(self, rows: int) -> Buffers:
        """An upper bound for each host number in `constants`, for batches of `rows` patches."""
        return {}
