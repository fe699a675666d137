"""What vision graphs cannot be combined with, refused in the frontend."""

from collections.abc import Iterator
from typing import Any

from vllm_graft.base.options import flag, target_of
from vllm_graft.base.refusal import Found, Refusal, Refusals, setting
from vllm_graft.graph_runners.vision.vision_config import NAME, VitConfig

_DROP = f"drop `{flag(NAME)}`"

REFUSALS = Refusals()
REFUSALS.append(
    Refusal(
        "`--enforce-eager`",
        "It rules out all graphs.",
        f"drop `--enforce-eager`, or {_DROP}",
        setting("model_config.enforce_eager", says="--enforce-eager is given"),
    )
)


@REFUSALS.row("platforms without CUDA graphs", "There is nothing to capture.", _DROP)
def _platform(vit: VitConfig, vllm_config: Any) -> Iterator[str]:
    from vllm.platforms import current_platform

    if target_of(vllm_config) is not None and not current_platform.support_static_graph_mode():
        yield f"The platform {current_platform.device_type} has no CUDA graphs"


@REFUSALS.row(
    "models that take text only, and `--language-model-only`",
    "There is no encoder to capture.",
    _DROP,
)
def _text_only(vit: VitConfig, vllm_config: Any) -> Iterator[Found | str]:
    model = target_of(vllm_config)
    if model is None:
        return
    if model.multimodal_config is None:
        yield "The model takes text only"
    elif model.multimodal_config.language_model_only:
        drop = f"drop --language-model-only, or drop {flag(NAME)}"
        yield Found("--language-model-only is given", drop)


@REFUSALS.row(
    "`cudagraph_mode: NONE` under Model Runner V1",
    "Model Runner V1 captures no encoder then.",
    f"set `compilation_config.cudagraph_mode` to PIECEWISE, or {_DROP}",
)
def _no_graphs(vit: VitConfig, vllm_config: Any) -> Iterator[str]:
    mode = getattr(vllm_config.compilation_config.cudagraph_mode, "name", None)
    has_model = target_of(vllm_config) is not None
    if has_model and not vllm_config.use_v2_model_runner and mode == "NONE":
        yield "compilation_config.cudagraph_mode is NONE"
