"""Pixtral's tower, which takes images of any size; Pixtral and Mistral 3 have it. Each image is a
segment, with positions by row and column. An exact graph holds images of one size. There are no
buckets, as the convolution and the patch merger work image by image."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.models.pixtral import (
    _make_packed_sequence_metadata,
    pixtral_patch_embed,
    position_ids_in_meshgrid,
)

from vllm_graft.graph_runners.vision.towers.adapter import VisionAdapter
from vllm_graft.graph_runners.vision.towers.tower import Buffers, Inputs, Item, Pieces

Size = tuple[int, int]


class AnySizeAdapter(VisionAdapter):
    """A tower that gets a list of images ``[channels, height, width]``, or a stack of them. A
    layout is the size of an image. Buffers are the images, ``[images, channels, height, width]``,
    and the constants of :meth:`positions` and of attention."""

    pixels = "pixel_values"
    seams = "pixtral"

    @property
    @abstractmethod
    def patch_size(self) -> int:
        """Side of a patch, in pixels."""

    @property
    @abstractmethod
    def merged(self) -> int:
        """How many patches along an edge become one token."""

    @abstractmethod
    def positions(self, grids: Sequence[Size]) -> Buffers:
        """The rotary tables ``[patches, ...]`` of images, given their grids of patches."""

    @abstractmethod
    def attention(self) -> tuple[Any, int, int]:
        """An attention layer, the tower's width, and the number of ranks that share the tower."""

    def decline(self, inputs: Inputs) -> str | None:
        """Also decline all but images that consist of whole tokens."""
        if reason := super().decline(inputs):
            return reason
        images = inputs.get(self.pixels)
        if images is None or not len(images) or any(image.ndim != 3 for image in images):
            return "not_images"
        unit = self.patch_size * self.merged
        if any(edge % unit or not edge for image in images for edge in image.shape[1:]):
            return "ragged"
        return None

    def items(self, inputs: Inputs) -> list[Item]:
        return [
            Item(
                (self.pixels, tuple(image.shape), str(image.dtype)),
                math.prod(self._grid(image.shape)),
            )
            for image in inputs[self.pixels]
        ]

    def data(self, inputs: Inputs, indices: Sequence[int]) -> Pieces:
        return {self.pixels: [inputs[self.pixels][index][None] for index in indices]}

    def constants(self, items: Sequence[Item]) -> Buffers:
        """The positions, and the offsets of attention segments: one segment per image."""
        layer, width, ranks = self.attention()
        grids = [self._grid(item.layout[1]) for item in items]  # type: ignore[index]
        offsets, longest, lengths = _make_packed_sequence_metadata(
            [rows * columns for rows, columns in grids],
            layer.attn_backend,
            width,
            ranks,
            next(self.tower.parameters()).device,
        )
        found = {**self.positions(grids), "cu_seqlens": offsets, "max_seqlen": longest}
        return found if lengths is None else {**found, "sequence_lengths": lengths}

    def split(
        self, output: torch.Tensor, inputs: Inputs, indices: Sequence[int], items: Sequence[Item]
    ) -> list[torch.Tensor]:
        tokens = [items[index].rows // self.merged**2 for index in indices]
        return list(output.split(tokens))

    def select(self, inputs: Inputs, indices: Sequence[int]) -> dict[str, Any]:
        return {self.pixels: [inputs[self.pixels][index] for index in indices]}

    @property
    @abstractmethod
    def tower(self) -> Any: ...

    def _grid(self, shape: Sequence[int]) -> Size:
        return shape[1] // self.patch_size, shape[2] // self.patch_size

    def _patches(self, images: torch.Tensor) -> torch.Tensor:
        """Convolve image by image, as the model does: ``[1, patches, width]``, before the norm."""
        convolved = [
            self.tower.patch_conv(image[None].to(self.tower.dtype)) for image in images.unbind(0)
        ]
        return torch.cat([found.flatten(2).transpose(1, 2) for found in convolved], dim=1)

    def _segments(self, buffers: Buffers) -> dict[str, torch.Tensor | None]:
        names = ("cu_seqlens", "max_seqlen", "sequence_lengths")
        return {name: buffers.get(name) for name in names}


class PixtralAdapter(AnySizeAdapter):
    """The adapter of ``PixtralForConditionalGeneration``, in Mistral's own format."""

    pixels = "images"

    @property
    def tower(self) -> Any:
        return self.model.vision_encoder

    @property
    def patch_size(self) -> int:
        return int(self.model.vision_args.patch_size)

    @property
    def merged(self) -> int:
        merger = self.model.patch_merger
        return 1 if merger is None else int(self.model.vision_args.spatial_merge_size)

    def attention(self) -> tuple[Any, int, int]:
        first = self.tower.transformer.layers[0].attention
        args = self.model.vision_args
        return first.attn, args.hidden_size, args.num_attention_heads // first.n_heads

    def positions(self, grids: Sequence[Size]) -> Buffers:
        """One complex table: the entries of the tower's table for each patch."""
        table = self.tower.freqs_cis
        parts = [table[:rows, :columns].flatten(0, 1) for rows, columns in grids]
        return {"freqs_cis": torch.cat(parts)}

    def decline(self, inputs: Inputs) -> str | None:
        """Also decline images that exceed the table of positions; the model refuses them."""
        if reason := super().decline(inputs):
            return reason
        most = self.tower.max_patches_per_side
        shapes = [self._grid(image.shape) for image in inputs[self.pixels]]
        return "too_wide" if any(max(shape) > most for shape in shapes) else None

    def forward(self, buffers: Buffers) -> torch.Tensor:
        """Run tower, norm, merger and projector: ``[tokens, hidden]`` of all images."""
        images, model = buffers[self.pixels], self.model
        patches = self.tower.ln_pre(self._patches(images))
        features = self.tower.transformer(
            patches, freqs_cis=buffers["freqs_cis"], **self._segments(buffers)
        ).squeeze(0)
        if model.pre_mm_projector_norm is not None:
            features = model.pre_mm_projector_norm(features)
        if model.patch_merger is not None:
            grids = [self._grid(images.shape[1:])] * images.shape[0]
            features = model.patch_merger(features, image_sizes=grids)
        embeddings: torch.Tensor = model.vision_language_adapter(features)
        return embeddings


class Mistral3Adapter(AnySizeAdapter):
    """The adapter of ``Mistral3ForConditionalGeneration``, Transformers' Pixtral included."""

    @property
    def tower(self) -> Any:
        return self.model.vision_tower

    @property
    def patch_size(self) -> int:
        return int(self.model.config.vision_config.patch_size)

    @property
    def merged(self) -> int:
        return int(self.model.config.spatial_merge_size)

    def attention(self) -> tuple[Any, int, int]:
        first = self.tower.transformer.layers[0].attention
        return first.attn, self.tower.config.hidden_size, first.tp_size

    def positions(self, grids: Sequence[Size]) -> Buffers:
        """The cosines and sines, ``[patches, head size]`` each."""
        config, tower = self.tower.config, self.tower
        weight = tower.patch_conv.weight
        # Since vLLM 0.33 the positions are made where the patches are.
        shapes = [weight.new_empty(1, *grid) for grid in grids]
        places = position_ids_in_meshgrid(shapes, config.image_size // config.patch_size)
        # The embedding reads only dtype and device of its first argument.
        like = weight.new_empty(1, 1, config.hidden_size)
        cosines, sines = tower.patch_positional_embedding(like, places.to(weight.device))
        return {"cosines": cosines, "sines": sines}

    def forward(self, buffers: Buffers) -> torch.Tensor:
        """Run tower and projector: ``[tokens, hidden]`` of all images."""
        images, tower = buffers[self.pixels], self.tower
        if tower.input_norm is not None:
            weight = tower.patch_conv.weight
            patches, _ = pixtral_patch_embed(list(images.unbind(0)), weight, tower.input_norm)
        else:
            patches = self._patches(images)
        features = tower.transformer(
            tower.ln_pre(patches),
            (buffers["cosines"], buffers["sines"]),
            **self._segments(buffers),
            return_all_hidden_states=False,
        ).squeeze(0)
        sizes = [tuple(images.shape[2:])] * images.shape[0]
        embeddings: torch.Tensor = self.model.multi_modal_projector(features, sizes)
        return embeddings
