"""The tower of models whose items are grids of patches, such as Qwen's vision models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.ops import vit_attn_wrappers
from vllm.v1.worker.encoder_cudagraph_defs import EncoderCudaGraphConfig

from vllm_graft.base.errors import SeamError
from vllm_graft.graph_runners.vision.capture.graph_backend import CaptureStream
from vllm_graft.graph_runners.vision.towers.adapter import row_slices
from vllm_graft.graph_runners.vision.towers.tower import Buffers, Inputs, Item, Pieces, Tower
from vllm_graft.seams.permission import require_seams

if TYPE_CHECKING:
    from vllm_graft.graph_runners.vision.fused.blocks import FusedBlocks

PIXELS = "pixel_values"
_SEGMENT = (4, 8)
"""Merged height and width of a padding segment: 128 patches where 2 by 2 are merged."""


class GridTower(Tower):
    """The tower of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4.1V and Cohere Compass. An item is a grid
    of patches, and all metadata follow from the grids. Data are pixels, ``[patches, features]``."""

    def __init__(
        self, model: Any, config: EncoderCudaGraphConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._model = model
        self._device, self._dtype = device, dtype
        self.modalities = tuple(config.modalities)
        self._merge = int(model.visual.spatial_merge_size)
        self.unit = self._merge**2
        self._blocks: FusedBlocks | None = None

    def fuse(
        self, side_stream: Callable[[], CaptureStream | None], agree: Callable[[bool], bool]
    ) -> None:
        found = fused_blocks(self._model, side_stream, agree)
        if isinstance(found, str):
            self.unfuse(found)
        else:
            self._blocks, self.fused = found, found.parts

    def unfuse(self, why: str) -> None:
        super().unfuse(why)
        self._blocks = None

    def decline(self, inputs: Inputs) -> str | None:
        """Also decline inputs of two modalities, as the protocol would drop one of them."""
        if reason := super().decline(inputs):
            return reason
        grids = [name for name in inputs if name.endswith("_grid_thw")]
        if len(grids) != 1:
            return "mixed_modalities"
        modality = grids[0].removesuffix("_grid_thw")
        pixels = inputs.get(PIXELS if modality == "image" else f"{PIXELS}_{modality}s")
        if not isinstance(pixels, torch.Tensor):
            return "not_one_tensor"
        rows = sum(t * h * w for t, h, w in self._model._get_grid_thw_by_modality(inputs))
        return None if rows == pixels.shape[0] else "rows_mismatch"

    def items(self, inputs: Inputs) -> list[Item]:
        modality = self._model.get_input_modality(inputs)
        dtype = str(self._pixels(inputs).dtype)
        return [
            Item((modality, t, h, w, dtype), t * h * w)
            for t, h, w in self._model._get_grid_thw_by_modality(inputs)
        ]

    def data(self, inputs: Inputs, indices: Sequence[int]) -> Pieces:
        grids = self._model._get_grid_thw_by_modality(inputs)
        return {PIXELS: row_slices(self._pixels(inputs), [t * h * w for t, h, w in grids], indices)}

    def constants(self, items: Sequence[Item]) -> Buffers:
        """The metadata of the eager pass, without padding."""
        layouts: list[Any] = [item.layout for item in items]
        modality = layouts[0][0]
        grids = [list(layout[1:4]) for layout in layouts]
        suffix = "" if modality == "image" else f"_{modality}s"
        inputs = {f"{PIXELS}{suffix}": torch.empty(0), f"{modality}_grid_thw": grids}
        # A batch has at least one segment, so padding it to one segment adds nothing.
        prepared = self._model.prepare_encoder_cudagraph_replay_buffers(inputs, 1, 1)
        return {
            name: value
            for name, value in prepared.values.items()
            if name != PIXELS and value is not None
        }

    def forward(self, buffers: Buffers) -> Any:
        fused = self._blocks.installed() if self._blocks else nullcontext()
        with all_rows_written(), fused:
            # A copy, as the model removes entries from the dictionary.
            return self._model.encoder_cudagraph_forward(dict(buffers))

    def split(
        self, output: Any, inputs: Inputs, indices: Sequence[int], items: Sequence[Item]
    ) -> list[torch.Tensor]:
        """Cut the output's rows, which follow the items; padding comes last."""
        sizes = [items[index].rows // self.unit for index in indices]
        return list(output[: sum(sizes)].split(sizes))

    def eager(self, inputs: Inputs, indices: Sequence[int]) -> list[torch.Tensor]:
        items = self.items(inputs)
        if list(indices) != list(range(len(items))):
            inputs = self._model.select_encoder_cudagraph_items(inputs, list(indices))
        output = self._model.encoder_eager_forward(inputs)
        return self.split(output, inputs, indices, items)

    def eager_fused(self, inputs: Inputs, indices: Sequence[int]) -> list[torch.Tensor] | None:
        """The same pass with fused blocks, but with no mergers beside them."""
        if self._blocks is None:
            return None
        with self._blocks.installed(aside=False):
            return self.eager(inputs, indices)

    def padding(self, like: Item, rows: int) -> list[Item] | None:
        """One item of small frames and one item for the rest, so that all segments are short."""
        if rows % self.unit:
            return None
        layout: Any = like.layout
        modality, dtype = layout[0], layout[-1]
        height, width = (side * self._merge for side in _SEGMENT)
        frames, rest = divmod(rows, height * width)
        fill = []
        if frames:
            fill.append(Item((modality, frames, height, width, dtype), rows - rest))
        if rest:
            fill.append(Item((modality, 1, self._merge, rest // self._merge, dtype), rest))
        return fill

    def bounds(self, rows: int) -> Buffers:
        """The bounds that the model itself freezes for a budget of so many tokens."""
        prepared = self._model.prepare_encoder_cudagraph_capture_inputs(
            rows // self.unit, 1, 1, self._device, self._dtype
        )
        return {
            name: value
            for name, value in prepared.values.items()
            if value is not None and value.ndim == 0
        }

    def sample(self, rows: int) -> Inputs | None:
        """Two images of noise that fill 13/16 of the rows. A bucket serves hardly less than that,
        as the next smaller one has 4/5 of its rows."""
        first, second = self._grid(rows * 3 // 4), self._grid(rows // 16)
        grids = [grid for grid in (first, second) if grid[1]]
        if not grids:
            return None
        prepared = self._model.prepare_encoder_cudagraph_capture_inputs(
            1, 1, 1, self._device, self._dtype
        )
        like = prepared.values[PIXELS]
        total = sum(t * h * w for t, h, w in grids)
        # A fixed seed, so that ranks that share a tower see the same noise.
        generator = torch.Generator(self._device).manual_seed(0)
        noise = 255 * torch.rand(total, *like.shape[1:], device=self._device, generator=generator)
        if like.dtype.is_floating_point:
            noise = noise / 127.5 - 1
        return {PIXELS: noise.to(like.dtype), "image_grid_thw": grids}

    def _grid(self, rows: int) -> list[int]:
        """The grid of a nearly square image of at most so many rows; height 0 if there is none."""
        side = math.isqrt(rows // self.unit)
        width = rows // self.unit // side if side else 0
        return [1, side * self._merge, width * self._merge]

    def _pixels(self, inputs: Inputs) -> torch.Tensor:
        pixels: torch.Tensor = self._model._get_pixel_values_by_modality(inputs)
        return pixels


def fused_blocks(
    model: Any, side_stream: Callable[[], CaptureStream | None], agree: Callable[[bool], bool]
) -> FusedBlocks | str:
    """Fuse as many operators of a model's vision blocks as keep their bits, or say why not any.
    Runs blocks on noise, and waits for the device. Never raises: a vLLM that differs from the
    ledger, for example, only means that the blocks run as they are."""
    try:
        require_seams("fused")
        from vllm_graft.graph_runners.vision.fused.bit_check import agreed_blocks
        from vllm_graft.graph_runners.vision.fused.side_mergers import find_side_mergers

        found = agreed_blocks(model, agree=agree)
        if not isinstance(found, str):
            found.mergers = find_side_mergers(model, side_stream)
        return found
    except SeamError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@contextmanager
def all_rows_written() -> Iterator[None]:
    """Keep vLLM from zeroing the output of each captured attention in the body. vLLM's own graphs
    need the zeros: their padded rows belong to no segment, so attention does not write them (vLLM
    #57136). In our graphs every row belongs to a segment and is written, so the zeros would be one
    useless kernel per layer."""
    platform = vit_attn_wrappers.current_platform
    vit_attn_wrappers.current_platform = _NotCuda(platform)
    try:
        yield
    finally:
        vit_attn_wrappers.current_platform = platform


class _NotCuda:
    """The platform, but not CUDA: vLLM's attention module asks that only to decide about zeros."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cuda(self) -> bool:
        return False
