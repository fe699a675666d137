"""Phi-4-multimodal: a SigLIP tower over the crops of an image, which a mask then puts together.

The graph holds the tower, over crops of one size. The rest reads the mask on the host, as the model
does, and stays eager.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vllm_graft.graph_runners.vision.towers.adapter import VisionAdapter, row_slices
from vllm_graft.graph_runners.vision.towers.tower import Buffers, Inputs, Item, Pieces

PIXELS, MASK, SIZES, TOKENS = (
    "input_image_embeds",
    "image_attention_mask",
    "image_sizes",
    "num_img_tokens",
)


class Phi4MMAdapter(VisionAdapter):
    """The adapter of ``Phi4MMForCausalLM``; audio is left to the model.

    An item is an image ``[crops, channels, height, width]`` with a mask of patches ``[crops, rows,
    columns]``. Its layout is the number of crops and their size.
    """

    seams = "phi4mm"

    def decline(self, inputs: Inputs) -> str | None:
        """Decline all but images; the processor's "image embeds" are pixels, so they are served."""
        if any(name not in inputs for name in (PIXELS, MASK, SIZES, TOKENS)):
            return "not_images"
        if any("embeds" in name for name in inputs if name != PIXELS):
            return "precomputed"
        pixels, masks = inputs[PIXELS], inputs[MASK]
        fits = len(pixels) == len(masks) and all(
            image.ndim == 4 and mask.ndim == 3 and len(image) == len(mask)
            for image, mask in zip(pixels, masks)
        )
        return None if fits and len(pixels) else "not_images"

    def items(self, inputs: Inputs) -> list[Item]:
        return [
            Item((PIXELS, tuple(image.shape), str(image.dtype), str(mask.dtype)), mask.numel())
            for image, mask in zip(inputs[PIXELS], inputs[MASK])
        ]

    def data(self, inputs: Inputs, indices: Sequence[int]) -> Pieces:
        return {name: [inputs[name][index] for index in indices] for name in (PIXELS, MASK)}

    def forward(self, buffers: Buffers) -> torch.Tensor:
        """Run the tower: ``[crops, tokens, width]``, before crops are put together."""
        encoder = self.model.vision_encoder
        dtype = next(encoder.parameters()).dtype
        features: torch.Tensor = encoder.get_img_features(
            buffers[PIXELS].to(dtype), buffers[MASK].bool()
        )
        return features

    def split(
        self, output: torch.Tensor, inputs: Inputs, indices: Sequence[int], items: Sequence[Item]
    ) -> list[torch.Tensor]:
        """Let the model's own code put each image together from its crops' features."""
        encoder = self.model.vision_encoder
        crops = [len(inputs[PIXELS][index]) for index in indices]
        found = []
        for place, index in enumerate(indices):
            [features] = row_slices(output, crops, [place])
            stand_in = _WithFeatures(encoder, features)
            pixels, mask = inputs[PIXELS][index][None], inputs[MASK][index][None]
            sizes = inputs[SIZES][index : index + 1]
            found += type(encoder).forward(stand_in, pixels, sizes, mask)
        return found

    def select(self, inputs: Inputs, indices: Sequence[int]) -> dict[str, Any]:
        return {
            name: [inputs[name][index] for index in indices] for name in (PIXELS, MASK, TOKENS)
        } | {SIZES: inputs[SIZES][list(indices)]}


class _WithFeatures:
    """The encoder with the tower's features already computed."""

    def __init__(self, encoder: Any, features: torch.Tensor) -> None:
        self._encoder, self._features = encoder, features

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def get_img_features(self, *_: Any) -> torch.Tensor:
        return self._features
