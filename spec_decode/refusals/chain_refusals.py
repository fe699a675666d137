"""Combinations with graphs of a standalone draft model that are refused in the frontend."""

from collections.abc import Iterator
from typing import Any

from vllm_graft.base.options import flag, target_of
from vllm_graft.base.refusal import Find, Found, Refusal, Refusals, setting
from vllm_graft.spec_decode.config.draft_config import DraftConfig
from vllm_graft.spec_decode.refusals.engine_refusals import old_runner, overlap, ranks

NO_DRAFT = (
    "There is no draft model: add --speculative-config "
    '\'{"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 5}\'.'
)

_DROP = f"drop `{flag('draft')}`"
_UNTRIED = "It splits a request's rows, or the loop, over ranks; nobody has tried that."

REFUSALS = Refusals()


def _in_spec(find: Find) -> Find:
    """Look only where the method is right: other methods have other keys."""

    def only(draft: DraftConfig, vllm_config: Any) -> Iterator[Found | str]:
        if vllm_config.speculative_config.method == "draft_model":
            yield from find(draft, vllm_config)

    return only


REFUSALS.extend(
    (
        Refusal(
            "other methods than `draft_model`",
            "vLLM captures the loops of `eagle`, `eagle3` and `mtp` itself, and others have none.",
            f"set `speculative_config.method` to 'draft_model', or {_DROP}",
            setting("speculative_config.method", lambda method: method == "draft_model"),
        ),
        Refusal(
            "fewer than 2 speculative tokens",
            "The first token comes out of the pass over the accepted tokens, which is no loop.",
            "set `speculative_config.num_speculative_tokens` to 2 or more",
            _in_spec(
                setting("speculative_config.num_speculative_tokens", lambda tokens: tokens >= 2)
            ),
        ),
        Refusal(
            "`parallel_drafting`",
            "It drafts all tokens at once.",
            "set `speculative_config.parallel_drafting` to false",
            _in_spec(setting("speculative_config.parallel_drafting")),
        ),
        Refusal(
            "`enable_adaptive_verification`",
            "It estimates acceptance while drafting; nobody has tried that in these graphs.",
            "set `speculative_config.enable_adaptive_verification` to false",
            _in_spec(setting("speculative_config.enable_adaptive_verification")),
        ),
        old_runner("It drafts by other classes."),
        ranks(
            "data",
            "vLLM hands the target's number of tokens to the draft's loop, so ranks agree on no "
            "padded size.",
        ),
        *(ranks(kind, _UNTRIED) for kind in ("pipeline", "decode context", "prefill context")),
        overlap("It splits the draft's rows."),
    )
)


@REFUSALS.row("`--enforce-eager`", "It rules out all graphs.", f"drop it, or {_DROP}")
def _eager(draft: DraftConfig, vllm_config: Any) -> Iterator[str]:
    target = target_of(vllm_config)
    if target is not None and target.enforce_eager:
        yield "--enforce-eager is given"
    elif vllm_config.speculative_config.enforce_eager:
        yield "speculative_config.enforce_eager is true"


@REFUSALS.row("platforms without CUDA graphs", "There is nothing to capture.", _DROP)
def _platform(draft: DraftConfig, vllm_config: Any) -> Iterator[str]:
    from vllm.platforms import current_platform

    if not current_platform.support_static_graph_mode():
        yield f"The platform {current_platform.device_type} has no CUDA graphs"


@REFUSALS.row(
    "a `cudagraph_mode` without FULL decodes",
    "The loop is captured as a whole.",
    "set `compilation_config.cudagraph_mode` to FULL_AND_PIECEWISE or FULL_DECODE_ONLY, or "
    f"{_DROP}",
)
def _graph_mode(draft: DraftConfig, vllm_config: Any) -> Iterator[str]:
    mode = getattr(vllm_config.compilation_config.cudagraph_mode, "name", None)
    target = target_of(vllm_config)
    if mode == "PIECEWISE" or (mode == "NONE" and target is not None and not target.enforce_eager):
        yield f"compilation_config.cudagraph_mode is {mode}"
