"""The tower of models whose items are grids of patches, such as Qwen's vision models."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from vllm_graft.graph_runners.vision.fused.fusion import fused_blocks
from vllm_graft.graph_runners.vision.towers.adapter import row_slices
from vllm_graft.graph_runners.vision.towers.encoder_attention import all_rows_written
from vllm_graft.graph_runners.vision.towers.tower import Buffers, Inputs, Item, Pieces, Tower

if TYPE_CHECKING:
    from vllm.v1.worker.encoder_cudagraph_defs import EncoderCudaGraphConfig

    from vllm_graft.graph_runners.vision.capture.graph_backend import SideStream
    from vllm_graft.graph_runners.vision.fused.blocks import FusedBlocks

PIXELS = "pixel_values"
_SEGMENT = (4, 8)
"""Merged height and width of a padding segment: 128 patches where 2 by 2 are merged."""


class GridTower(Tower):
    """The tower of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4.1V and Cohere Compass.

    An item is a grid of patches, and all metadata follow from the grids. So the data are only the
    pixels, ``[patches, features]``.
    """

    def __init__(
        self, model: Any, config: EncoderCudaGraphConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._model = model
        self._device, self._dtype = device, dtype
        self.modalities = tuple(config.modalities)
        merge = int(model.visual.spatial_merge_size)
        self._merge = merge
        self.unit = merge * merge
        self._blocks: FusedBlocks | None = None

    def fuse(
        self, side_stream: Callable[[], SideStream | None], agree: Callable[[bool], bool]
    ) -> None:
        """Compile the fused kernels, and compare them with the blocks on noise."""
        found = fused_blocks(self._model, side_stream, agree)
        if isinstance(found, str):
            self.unfuse(found)
        else:
            self._blocks, self.fused = found, found.parts

    def unfuse(self, why: str) -> None:
        """Capture the blocks as they are from now on."""
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
        """One item per grid; its layout is modality, grid and dtype."""
        modality = self._model.get_input_modality(inputs)
        dtype = str(self._pixels(inputs).dtype)
        return [
            Item((modality, t, h, w, dtype), t * h * w)
            for t, h, w in self._model._get_grid_thw_by_modality(inputs)
        ]

    def data(self, inputs: Inputs, indices: Sequence[int]) -> Pieces:
        """The patches of the items."""
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
        """Run the whole tower."""
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
        """The embeddings of the model's own pass over these items."""
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
        """Two images of noise that fill 13/16 of the rows.

        A bucket serves hardly less than that, as the next smaller one has 4/5 of its rows.
        """
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
