"""LLaVA 1.5 and PaliGemma: a CLIP or SigLIP tower of one image size, and a projector."""

from typing import Any

import torch
from vllm.config import VllmConfig

from vllm_graft.graph_runners.vision.towers.adapter import FixedSizeAdapter


class LlavaAdapter(FixedSizeAdapter):
    """The adapter of ``LlavaForConditionalGeneration`` with a tower of fixed size."""

    @classmethod
    def refuses(cls, model: Any) -> str | None:
        if model.config.vision_config.model_type == "pixtral":
            return "its vision tower is Pixtral's, which takes images of any size"
        return None

    def __init__(self, model: Any, vllm_config: VllmConfig) -> None:
        super().__init__(model, vllm_config)
        side = int(model.config.vision_config.image_size)
        self.image_size = (int(model.config.vision_config.num_channels), side, side)

    @property
    def patch_size(self) -> int:
        return int(self.model.config.vision_config.patch_size)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        features = self.model._image_pixels_to_features(self.model.vision_tower, pixels)
        projected: torch.Tensor = self.model.multi_modal_projector(features)
        return projected


class PaliGemmaAdapter(LlavaAdapter):
    """The adapter of ``PaliGemmaForConditionalGeneration``: always SigLIP, named like LLaVA's."""

    @classmethod
    def refuses(cls, model: Any) -> str | None:
        return None
