"""Random weights of any model, the same in each process, made where vLLM would load files."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from vllm_graft.proof.arms import FORMAT

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig

_GAIN = 1.5
"""By how much a product with a weight grows, so that attention looks at few tokens and counts."""

_SHARP, _BLUNT = 4.0, 2.0
"""Standard deviation of the logits in 32 and in 16 bits. With 4, few tokens are nearly as likely as
the best, but rounding in 16 bits moves log-probabilities behind MLA by up to 0.4 nats."""


def register() -> None:
    """Let vLLM's engines of this process load with `FORMAT`."""
    register_model_loader(FORMAT)(RandomWeights)


class RandomWeights(BaseModelLoader):
    """Fills every weight by its name; files of weights are not looked for."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Download nothing."""

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        for name, weight in model.named_parameters():
            weight.data.copy_(_filled(name, weight))


def _filled(name: str, weight: torch.nn.Parameter) -> torch.Tensor:
    import torch

    if not weight.is_floating_point():
        return torch.zeros_like(weight)
    if weight.dim() == 1 and name.endswith("weight"):
        return torch.ones_like(weight)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    drawn = torch.randn(weight.shape, generator=generator)
    if weight.dim() == 1:
        return drawn * 0.1
    outer = "embed_tokens" in name or "lm_head" in name
    sharp = _SHARP if weight.element_size() == 4 else _BLUNT
    gain = sharp if outer else _GAIN
    # Three dimensions are experts or short convolutions: the last one is summed over.
    summed = weight.shape[-1] if weight.dim() == 3 else weight[0].numel()
    return drawn * gain * summed**-0.5
