"""What vision graphs cannot be combined with, refused in the frontend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_graft.base.options import flag, target_of
from vllm_graft.base.refusal import Refusal
from vllm_graft.graph_runners.vision.vision_config import NAME, VitConfig

_DROP = f"drop {flag(NAME)}"


def _platform(vit: VitConfig, vllm_config: Any) -> Iterator[str]:
    from vllm.platforms import current_platform

    if target_of(vllm_config) is not None and not current_platform.support_static_graph_mode():
        yield f"The platform {current_platform.device_type} has no CUDA graphs: {_DROP}."


def _text_only(vit: VitConfig, vllm_config: Any) -> Iterator[str]:
    model = target_of(vllm_config)
    if model is None:
        return
    if model.multimodal_config is None:
        yield f"The model takes text only: {_DROP}."
    elif model.multimodal_config.language_model_only:
        yield f"--language-model-only leaves the encoder out: drop it, or {_DROP}."


def _eager(vit: VitConfig, vllm_config: Any) -> Iterator[str]:
    model = target_of(vllm_config)
    if model is not None and model.enforce_eager:
        yield f"--enforce-eager rules out all graphs: drop it, or {_DROP}."


def _no_graphs(vit: VitConfig, vllm_config: Any) -> Iterator[str]:
    mode = getattr(vllm_config.compilation_config.cudagraph_mode, "name", None)
    has_model = target_of(vllm_config) is not None
    if has_model and not vllm_config.use_v2_model_runner and mode == "NONE":
        yield (
            "compilation_config.cudagraph_mode is NONE, with which Model Runner V1 captures no "
            f"encoder either: set it to PIECEWISE, or {_DROP}."
        )


REFUSALS: tuple[Refusal, ...] = (
    Refusal("platforms without CUDA graphs", "There is nothing to capture.", "drop it", _platform),
    Refusal(
        "models that take text only, and `--language-model-only`",
        "There is no encoder to capture.",
        "drop it",
        _text_only,
    ),
    Refusal("`--enforce-eager`", "It rules out all graphs.", "drop it", _eager),
    Refusal(
        "`cudagraph_mode: NONE` under Model Runner V1",
        "That runner captures no encoder then.",
        "`PIECEWISE`",
        _no_graphs,
    ),
)
