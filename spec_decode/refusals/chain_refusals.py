"""What graphs of a standalone draft model cannot be combined with, refused in the frontend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_graft.base.options import flag, target_of
from vllm_graft.base.refusal import Find, Refusal
from vllm_graft.spec_decode.config.draft_config import DraftConfig
from vllm_graft.spec_decode.refusals.engine_refusals import more_than_one, ubatching

NO_DRAFT = (
    "There is no draft model: add --speculative-config "
    '\'{"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 5}\'.'
)


def _method(draft: DraftConfig, vllm_config: Any) -> Iterator[str]:
    spec = vllm_config.speculative_config
    if spec.method != "draft_model":
        hint = ""
        if spec.method in ("eagle", "eagle3", "mtp"):
            hint = f" (of '{spec.method}' vLLM captures the loop itself)"
        yield (
            f"speculative_config.method is {spec.method!r}{hint}: set it to 'draft_model', or drop "
            f"{flag('draft')}."
        )


def _in_spec(find: Find) -> Find:
    """Look only where the method is right: other methods have other keys."""

    def only(draft: DraftConfig, vllm_config: Any) -> Iterator[str]:
        if vllm_config.speculative_config.method == "draft_model":
            yield from find(draft, vllm_config)

    return only


def _no_loop(draft: DraftConfig, vllm_config: Any) -> Iterator[str]:
    tokens = vllm_config.speculative_config.num_speculative_tokens
    if tokens < 2:
        yield (
            f"speculative_config.num_speculative_tokens is {tokens}, so there is no loop: set it "
            "to 2 or more."
        )


def _parallel_drafting(draft: DraftConfig, vllm_config: Any) -> Iterator[str]:
    if vllm_config.speculative_config.parallel_drafting:
        yield "speculative_config.parallel_drafting drafts all tokens at once: set it to false."


def _adaptive(draft: DraftConfig, vllm_config: Any) -> Iterator[str]:
    if vllm_config.speculative_config.enable_adaptive_verification:
        yield "speculative_config.enable_adaptive_verification: set it to false."


def _runner(draft: DraftConfig, vllm_config: Any) -> Iterator[str]:
    if not vllm_config.use_v2_model_runner:
        yield (
            "vLLM chose Model Runner V1 (its log says why): unset VLLM_USE_V2_MODEL_RUNNER and "
            "drop what V2 does not support."
        )


def _eager(draft: DraftConfig, vllm_config: Any) -> Iterator[str]:
    from vllm.platforms import current_platform

    drop, spec = f"or drop {flag('draft')}", vllm_config.speculative_config
    if not current_platform.support_static_graph_mode():
        yield f"The platform {current_platform.device_type} has no CUDA graphs: drop the key."
    elif _target_is_eager(vllm_config):
        yield f"--enforce-eager rules out all graphs: drop it, {drop}."
    elif spec.enforce_eager:
        yield f"speculative_config.enforce_eager is true: drop it, {drop}."


def _graph_mode(draft: DraftConfig, vllm_config: Any) -> Iterator[str]:
    mode = getattr(vllm_config.compilation_config.cudagraph_mode, "name", None)
    target = target_of(vllm_config)
    if mode == "PIECEWISE" or (mode == "NONE" and target is not None and not target.enforce_eager):
        yield (
            f"compilation_config.cudagraph_mode is {mode}, which captures no decode as a whole: "
            f"set it to FULL_AND_PIECEWISE or FULL_DECODE_ONLY, or drop {flag('draft')}."
        )


def _target_is_eager(vllm_config: Any) -> bool:
    target = target_of(vllm_config)
    return target is not None and bool(target.enforce_eager)


_UNTRIED = "It splits a request's rows, or the loop, over ranks; nobody has tried that."

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "other methods than `draft_model`",
        "vLLM captures the loops of `eagle`, `eagle3` and `mtp` itself.",
        "drop `graft.draft`",
        _method,
    ),
    Refusal(
        "fewer than 2 speculative tokens",
        "The first token comes out of the pass over the accepted tokens, which is no loop.",
        "2 or more",
        _in_spec(_no_loop),
    ),
    Refusal(
        "`parallel_drafting`",
        "It drafts all tokens at once.",
        "false",
        _in_spec(_parallel_drafting),
    ),
    Refusal(
        "`enable_adaptive_verification`",
        "It estimates acceptance while drafting; nobody has tried that in these graphs.",
        "false",
        _in_spec(_adaptive),
    ),
    Refusal(
        "Model Runner V1",
        "It drafts by other classes.",
        "unset `VLLM_USE_V2_MODEL_RUNNER`, and drop what V2 does not support",
        _runner,
    ),
    Refusal("`--enforce-eager`", "It rules out all graphs.", "drop it", _eager),
    Refusal(
        "a `cudagraph_mode` without FULL decodes",
        "The loop is captured as a whole.",
        "`FULL_AND_PIECEWISE` or `FULL_DECODE_ONLY`",
        _graph_mode,
    ),
    Refusal(
        "data parallelism",
        "vLLM hands the target's number of tokens to the draft's loop, so ranks agree on no "
        "padded size.",
        "`--data-parallel-size 1`",
        more_than_one("data_parallel_size"),
    ),
    Refusal(
        "pipeline parallelism",
        _UNTRIED,
        "`--pipeline-parallel-size 1`",
        more_than_one("pipeline_parallel_size"),
    ),
    Refusal(
        "decode context parallelism",
        _UNTRIED,
        "`--decode-context-parallel-size 1`",
        more_than_one("decode_context_parallel_size"),
    ),
    Refusal(
        "prefill context parallelism",
        _UNTRIED,
        "`--prefill-context-parallel-size 1`",
        more_than_one("prefill_context_parallel_size"),
    ),
    Refusal(
        "dual batch overlap",
        "It splits the draft's rows.",
        "drop `--enable-dbo` and `--ubatch-size`",
        ubatching("draft's"),
    ),
)
