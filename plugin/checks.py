"""What a tree cannot be combined with, refused in the frontend before any GPU work.

vLLM assumes that drafts form a chain in many places; where we do not (yet) undo the assumption,
the combination is refused with one sentence that says what to change. Each rule cites the place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vllm_graft import device_checks
from vllm_graft.base.errors import ConfigError
from vllm_graft.config import EagleConfig, GraftConfig, flag
from vllm_graft.draft_checks import validate_draft
from vllm_graft.hicache.config import CONNECTOR
from vllm_graft.spec_decode.targets.families import served_features
from vllm_graft.spec_decode.targets.features import unserved_in_model
from vllm_graft.vit_checks import validate_vit

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MAX_NODES = 63
"""Bits of an int64 ancestor mask that are left beside the root's."""

Rule = Callable[[EagleConfig, Any], Iterator[str]]


def validate(config: GraftConfig, vllm_config: VllmConfig) -> None:
    """Refuse a configuration that a part of ``config`` cannot serve.

    ``vllm_config`` may be complete or one that vLLM derived from it for the draft model (it keeps
    ``speculative_config``, whose target is looked at).

    Raises:
        ConfigError: with a sentence for each thing to change.
    """
    if config.vit is not None:
        validate_vit(config.vit, vllm_config)
    if config.draft is not None:
        validate_draft(config.draft, vllm_config)
    if config.eagle is None:
        return
    rules = RULES if vllm_config.speculative_config is not None else (_speculative_config,)
    problems = [problem for rule in rules for problem in rule(config.eagle, vllm_config)]
    if problems:
        head = f"{flag('eagle')} asks for tree drafts, which this configuration rules out:"
        raise ConfigError("\n  ".join([head, *problems]))


def _speculative_config(eagle: EagleConfig, vllm_config: Any) -> Iterator[str]:
    yield (
        "There is no draft model: add --speculative-config "
        '\'{"method": "eagle3", "model": DRAFT, "num_speculative_tokens": 31}\'.'
    )


def _method(eagle: EagleConfig, vllm_config: Any) -> Iterator[str]:
    method = vllm_config.speculative_config.method
    if method not in ("eagle", "eagle3"):
        yield f"speculative_config.method is {method!r}: set it to 'eagle' or 'eagle3'."


def _nodes(eagle: EagleConfig, vllm_config: Any) -> Iterator[str]:
    nodes = vllm_config.speculative_config.num_speculative_tokens
    if not 1 <= nodes <= MAX_NODES:
        yield (
            f"speculative_config.num_speculative_tokens is the number of tree nodes, got {nodes}: "
            f"set it to 1..{MAX_NODES}."
        )
    elif nodes > eagle.max_nodes:
        yield (
            f"speculative_config.num_speculative_tokens is {nodes}, but a tree of topk "
            f"{eagle.topk} and {eagle.steps} steps holds {eagle.max_nodes} nodes: lower it, or "
            f"raise {flag('eagle', 'topk')} or {flag('eagle', 'steps')}."
        )


def _drafting(eagle: EagleConfig, vllm_config: Any) -> Iterator[str]:
    spec = vllm_config.speculative_config
    # Top-k drafts are no sample of the draft's distribution; [reqs, nodes, vocab] logits are GiBs.
    if spec.draft_sample_method != "greedy":
        yield (
            f"speculative_config.draft_sample_method is {spec.draft_sample_method!r}: "
            "drop it, tree verification is exact without draft probabilities."
        )
    # v1/worker/gpu/spec_decode/rejection_sampler.py compares row i with draft i + 1.
    if spec.rejection_sample_method != "standard":
        yield (
            f"speculative_config.rejection_sample_method is {spec.rejection_sample_method!r}: "
            "set it to 'standard', a tree has its own verification."
        )
    # It argmaxes shards of the vocabulary; a tree needs the best k.
    if spec.use_local_argmax_reduction:
        yield "speculative_config.use_local_argmax_reduction keeps one token: set it to false."
    if spec.parallel_drafting:
        yield "speculative_config.parallel_drafting drafts a chain at once: set it to false."
    # It shortens a chain from its end by a confidence that a tree's nodes don't have.
    if spec.enable_adaptive_verification:
        yield "speculative_config.enable_adaptive_verification needs a chain: set it to false."


def _runner(eagle: EagleConfig, vllm_config: Any) -> Iterator[str]:
    # V1 has no ModelState to put verification and compaction in.
    if not vllm_config.use_v2_model_runner:
        yield (
            "vLLM chose Model Runner V1 (its log says why): unset VLLM_USE_V2_MODEL_RUNNER and "
            "drop what V2 does not support; it also needs a working Triton."
        )
    # A FULL graph of a mixed batch would put prefill rows through the tree's decode attention.
    mode = getattr(vllm_config.compilation_config.cudagraph_mode, "name", None)
    if mode == "FULL":
        yield (
            "compilation_config.cudagraph_mode is FULL, which captures mixed batches: set it to "
            "FULL_AND_PIECEWISE, FULL_DECODE_ONLY, PIECEWISE or NONE."
        )


def _auto(eagle: EagleConfig, vllm_config: Any) -> Iterator[str]:
    if eagle.tree != "auto":
        return
    # vLLM drops its number of drafts by batch size there: ranks would choose different ones.
    if vllm_config.parallel_config.data_parallel_size > 1:
        yield (
            f"{flag('eagle', 'tree')} is 'auto' and data_parallel_size is "
            f"{vllm_config.parallel_config.data_parallel_size}: set the tree to 'fixed'."
        )
    # The choice is made in vLLM's own Scheduler.
    if vllm_config.scheduler_config.scheduler_cls is not None:
        yield (
            f"{flag('eagle', 'tree')} is 'auto' and --scheduler-cls is "
            f"{vllm_config.scheduler_config.scheduler_cls!r}: drop one of them."
        )


def _parallel(eagle: EagleConfig, vllm_config: Any) -> Iterator[str]:
    parallel = vllm_config.parallel_config
    # The speculator lives on the last rank; the accepted path is not sent to the others.
    if parallel.pipeline_parallel_size > 1:
        yield _set_to_one("--pipeline-parallel-size", parallel.pipeline_parallel_size)
    # Rows of one request are split over ranks: the tree's mask and compaction need all of them.
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) > 1:
            yield _set_to_one("--" + name.replace("_", "-"), getattr(parallel, name))
    if parallel.use_ubatching:
        yield "Dual batch overlap splits the tree's rows: drop --enable-dbo and --ubatch-size."
    if parallel.enable_batch_sharded_sampling:
        yield "--enable-batch-sharded-sampling splits the tree's rows: drop it."


def _levels(eagle: EagleConfig, vllm_config: Any) -> Iterator[str]:
    # vLLM compiles, and sizes buffers of, layers for at most max_num_batched_tokens rows.
    scheduler = vllm_config.scheduler_config
    rows, most = scheduler.max_num_seqs * eagle.topk, scheduler.max_num_batched_tokens
    if rows > most:
        yield (
            f"A level of the draft has {rows} rows (--max-num-seqs {scheduler.max_num_seqs} times "
            f"{flag('eagle', 'topk')} {eagle.topk}), but --max-num-batched-tokens is {most}: set "
            f"--max-num-seqs to {most // eagle.topk} or less, or --max-num-batched-tokens to "
            f"{rows} or more."
        )


def _target(eagle: EagleConfig, vllm_config: Any) -> Iterator[str]:
    model = _target_model(vllm_config)
    if model is None:
        return
    for feature, says in unserved_in_model(model, served_features()):
        yield _other_target(says, feature.or_else)


def _hot_tokens(eagle: EagleConfig, vllm_config: Any) -> Iterator[str]:
    model, hot = _target_model(vllm_config), eagle.hot_tokens
    if model is None or hot is None:
        return
    name, topk = flag("eagle", "hot_tokens"), f"{flag('eagle', 'topk')} {eagle.topk}"
    draft = getattr(vllm_config.speculative_config.draft_model_config, "hf_config", None)
    if isinstance(hot, int):
        vocabulary = getattr(draft, "draft_vocab_size", None) or model.get_vocab_size()
        if not eagle.topk <= hot < vocabulary:
            yield (
                f"{name} is {hot}, but must be at least {topk} and less than the draft's "
                f"vocabulary of {vocabulary} tokens: choose a quarter of it, say, or drop it."
            )
        return
    # torch is here already, and Triton must not be.
    from vllm_graft.spec_decode.heads.hot_tokens import load_hot_tokens

    try:
        listed = len(load_hot_tokens(hot, model.get_vocab_size()))
    except ConfigError as error:
        yield f"{error}."
        return
    if listed < eagle.topk:
        yield f"{name}: {hot!r} lists {listed} tokens, fewer than {topk}: list more tokens."


def _sampling(eagle: EagleConfig, vllm_config: Any) -> Iterator[str]:
    model = _target_model(vllm_config)
    if model is None:
        return
    # Its masks are cut at a chain's row boundaries.
    if model.return_sampling_mask:
        yield "--return-sampling-mask is not computed along a tree's path: drop it."
    # v1/worker/gpu/sample/trace_replay.py forces tokens by a chain's positions.
    if model.enable_trace_replay:
        yield "--enable-trace-replay forces a chain's tokens: drop it."
    # They may read a row's history from the rows before it.
    if model.logits_processors:
        yield "--logits-processors may read a chain's history: drop them."


def _features(eagle: EagleConfig, vllm_config: Any) -> Iterator[str]:
    # v1/worker/gpu/sample/watermark.py reads a row's history from the rows before it.
    if vllm_config.watermark_config is not None:
        yield "Watermarking reads a chain's history: drop --watermark-config."
    # A connector may save a block during the forward pass, before the accepted path is moved in.
    # Ours saves after it, and only what lies below the last accepted token.
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector != CONNECTOR:
        yield (
            f"The KV connector {transfer.kv_connector} may save blocks before they are compacted: "
            f"use {CONNECTOR}, or drop --kv-transfer-config."
        )


def _target_model(vllm_config: Any) -> Any:
    # In a configuration derived for the draft, model_config is the draft's.
    return vllm_config.speculative_config.target_model_config or vllm_config.model_config


def _set_to_one(name: str, value: int) -> str:
    return f"{name} is {value}: set it to 1."


def _other_target(reason: str, or_else: str = "") -> str:
    advice = f"serve another target{', ' + or_else if or_else else ''}, or drop {flag('eagle')}"
    return f"The target {reason}: {advice}."


RULES: tuple[Rule, ...] = (
    _method,
    _nodes,
    _drafting,
    _runner,
    _auto,
    _parallel,
    _levels,
    _target,
    _hot_tokens,
    device_checks.head_dtype,
    device_checks.attention,
    _sampling,
    _features,
)
