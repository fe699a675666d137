"""What graphs of a standalone draft model cannot be combined with, refused in the frontend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from vllm_graft.base.errors import ConfigError
from vllm_graft.config import DraftConfig, flag


def validate_draft(draft: DraftConfig, vllm_config: Any) -> None:
    """Refuse a configuration under which the loop of a draft model could not be captured.

    Raises:
        ConfigError: with a sentence for each thing to change.
    """
    rules = RULES if vllm_config.speculative_config is not None else (_speculative_config,)
    if problems := [problem for rule in rules for problem in rule(vllm_config)]:
        head = f"{flag('draft')} asks for CUDA graphs of the draft's loop, but:"
        raise ConfigError("\n  ".join([head, *problems]))


def _speculative_config(vllm_config: Any) -> Iterator[str]:
    yield (
        "There is no draft model: add --speculative-config "
        '\'{"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 5}\'.'
    )


def _method(vllm_config: Any) -> Iterator[str]:
    spec = vllm_config.speculative_config
    if spec.method != "draft_model":
        hint = ""
        if spec.method in ("eagle", "eagle3", "mtp"):
            hint = f" (of '{spec.method}' vLLM captures the loop itself)"
        yield (
            f"speculative_config.method is {spec.method!r}{hint}: set it to 'draft_model', or drop "
            f"{flag('draft')}."
        )
        return
    # The first token comes out of the pass over the accepted tokens, which is no part of the loop.
    if spec.num_speculative_tokens < 2:
        yield (
            f"speculative_config.num_speculative_tokens is {spec.num_speculative_tokens}, so "
            "there is no loop: set it to 2 or more."
        )
    if spec.parallel_drafting:
        yield "speculative_config.parallel_drafting drafts all tokens at once: set it to false."
    # It estimates acceptance while drafting; nobody has tried that in these graphs.
    if spec.enable_adaptive_verification:
        yield "speculative_config.enable_adaptive_verification: set it to false."


def _engine(vllm_config: Any) -> Iterator[str]:
    if not vllm_config.use_v2_model_runner:
        yield (
            "vLLM chose Model Runner V1 (its log says why): unset VLLM_USE_V2_MODEL_RUNNER and "
            "drop what V2 does not support."
        )


def _graphs(vllm_config: Any) -> Iterator[str]:
    from vllm.platforms import current_platform

    drop = f"or drop {flag('draft')}"
    spec = vllm_config.speculative_config
    # In a configuration derived for the draft, model_config is the draft's.
    model = spec.target_model_config or vllm_config.model_config
    if not current_platform.support_static_graph_mode():
        yield f"The platform {current_platform.device_type} has no CUDA graphs: drop the key."
    elif model is not None and model.enforce_eager:
        yield f"--enforce-eager rules out all graphs: drop it, {drop}."
    elif spec.enforce_eager:
        yield f"speculative_config.enforce_eager is true: drop it, {drop}."
    mode = getattr(vllm_config.compilation_config.cudagraph_mode, "name", None)
    if mode == "PIECEWISE" or (mode == "NONE" and model is not None and not model.enforce_eager):
        yield (
            f"compilation_config.cudagraph_mode is {mode}, which captures no decode as a whole: "
            f"set it to FULL_AND_PIECEWISE or FULL_DECODE_ONLY, {drop}."
        )


def _parallel(vllm_config: Any) -> Iterator[str]:
    parallel = vllm_config.parallel_config
    # v1/worker/gpu/spec_decode/standalone_ar/speculator.py hands the target's number of tokens to
    # the draft's loop: ranks agree on no padded size.
    # The others split a request's rows, or the loop, over ranks; nobody has tried them.
    for name in (
        "data_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if getattr(parallel, name) > 1:
            yield f"--{name.replace('_', '-')} is {getattr(parallel, name)}: set it to 1."
    if parallel.use_ubatching:
        yield "Dual batch overlap splits the draft's rows: drop --enable-dbo and --ubatch-size."


RULES: tuple[Callable[[Any], Iterator[str]], ...] = (_method, _engine, _graphs, _parallel)
