"""What vision graphs cannot be combined with, refused in the frontend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_graft.base.errors import ConfigError
from vllm_graft.config import VitConfig, flag


def validate_vit(vit: VitConfig, vllm_config: Any) -> None:
    """Refuse a configuration under which no vision encoder could be captured.

    Raises:
        ConfigError: with a sentence for each thing to change.
    """
    if problems := list(_problems(vllm_config)):
        head = f"{flag('vit')} asks for vision-encoder graphs, which this configuration rules out:"
        raise ConfigError("\n  ".join([head, *problems]))


def _problems(vllm_config: Any) -> Iterator[str]:
    from vllm.platforms import current_platform

    drop = f"drop {flag('vit')}"
    speculative = vllm_config.speculative_config
    # In a configuration derived for a draft, model_config is the draft's.
    model = getattr(speculative, "target_model_config", None) or vllm_config.model_config
    if model is None:
        return
    if not current_platform.support_static_graph_mode():
        yield f"The platform {current_platform.device_type} has no CUDA graphs: {drop}."
    if model.multimodal_config is None:
        yield f"The model takes text only: {drop}."
    elif model.multimodal_config.language_model_only:
        yield f"--language-model-only leaves the encoder out: drop it, or {drop}."
    if model.enforce_eager:
        yield f"--enforce-eager rules out all graphs: drop it, or {drop}."
    # v1/worker/gpu_model_runner.py captures nothing at all then.
    mode = getattr(vllm_config.compilation_config.cudagraph_mode, "name", None)
    if not vllm_config.use_v2_model_runner and mode == "NONE":
        yield (
            "compilation_config.cudagraph_mode is NONE, with which Model Runner V1 captures no "
            f"encoder either: set it to PIECEWISE, or {drop}."
        )
