"""What a tree cannot be combined with, refused in the frontend before any GPU work.

vLLM assumes that drafts form a chain in many places; where we do not (yet) undo the assumption,
the combination is refused with one sentence that says what to change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.options import flag
from vllm_graft.base.refusal import Find, Refusal
from vllm_graft.hooks import manager
from vllm_graft.spec_decode.block_refusals import BLOCKS, own_head_problems
from vllm_graft.spec_decode.config.supported import BACKENDS, KV_DTYPES, LATENT_BACKENDS
from vllm_graft.spec_decode.config.tree_config import MAX_NODES, TreeConfig
from vllm_graft.spec_decode.draft_refusals import DRAFTS
from vllm_graft.spec_decode.drafters.chosen import is_block
from vllm_graft.spec_decode.state_refusals import STATES, auto_widths
from vllm_graft.spec_decode.targets.families import served_features
from vllm_graft.spec_decode.targets.features import FEATURES, Feature

NO_DRAFT = (
    "There is no draft model: add --speculative-config "
    '\'{"method": "eagle3", "model": DRAFT, "num_speculative_tokens": 31}\'.'
)


def target_of(vllm_config: Any) -> Any:
    """The target's model configuration, also in a configuration derived for the draft."""
    return vllm_config.speculative_config.target_model_config or vllm_config.model_config


def _nodes(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    nodes = tree.nodes or vllm_config.speculative_config.num_speculative_tokens
    if tree.nodes is not None and nodes > tree.max_nodes:
        yield (
            f"{flag('tree', 'nodes')} is {nodes}, but a tree of topk {tree.topk} and a depth of "
            f"{tree.steps} (num_speculative_tokens) holds {tree.max_nodes} nodes: lower it, or "
            f"raise {flag('tree', 'topk')} or num_speculative_tokens."
        )
    elif not 1 <= nodes <= MAX_NODES:
        yield (
            f"speculative_config.num_speculative_tokens is the number of tree nodes, got {nodes}: "
            f"set it to 1..{MAX_NODES}."
        )
    elif nodes > tree.max_nodes:
        yield (
            f"speculative_config.num_speculative_tokens is {nodes}, but a tree of topk "
            f"{tree.topk} and {tree.steps} steps holds {tree.max_nodes} nodes: lower it, or "
            f"raise {flag('tree', 'topk')} or {flag('tree', 'steps')}."
        )


def _ngram(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    if tree.ngram is not None and tree.topk == 1:
        yield (
            f"{flag('tree', 'ngram')} adds branches to a tree, but here drafts are chains (topk "
            f"1): drop it, or set {flag('tree', 'topk')} to 2 or more, on a target that can verify "
            "trees."
        )


def _sampled_drafts(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    method = vllm_config.speculative_config.draft_sample_method
    if method != "greedy":
        yield (
            f"speculative_config.draft_sample_method is {method!r}: "
            "drop it, tree verification is exact without draft probabilities."
        )


def _rejection(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    method = vllm_config.speculative_config.rejection_sample_method
    if method != "standard":
        yield (
            f"speculative_config.rejection_sample_method is {method!r}: "
            "set it to 'standard', a tree has its own verification."
        )


def _set_in_speculative_config(name: str, sentence: str) -> Find:
    def find(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
        if getattr(vllm_config.speculative_config, name):
            yield f"speculative_config.{name} {sentence}: set it to false."

    return find


def _runner(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    if not vllm_config.use_v2_model_runner:
        yield (
            "vLLM chose Model Runner V1 (its log says why): unset VLLM_USE_V2_MODEL_RUNNER and "
            "drop what V2 does not support; it also needs a working Triton."
        )


def _full_graphs(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    mode = getattr(vllm_config.compilation_config.cudagraph_mode, "name", None)
    if mode == "FULL":
        yield (
            "compilation_config.cudagraph_mode is FULL, which captures mixed batches: set it to "
            "FULL_AND_PIECEWISE, FULL_DECODE_ONLY, PIECEWISE or NONE."
        )


def _auto_replicas(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    replicas = vllm_config.parallel_config.data_parallel_size if tree.shape == "auto" else 1
    if replicas > 1:
        yield (
            f"{flag('tree', 'shape')} is 'auto' and data_parallel_size is {replicas}: set the "
            "shape to 'fixed'."
        )


def _auto_scheduler(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    scheduler = vllm_config.scheduler_config.scheduler_cls if tree.shape == "auto" else None
    if scheduler is not None:
        yield (
            f"{flag('tree', 'shape')} is 'auto' and --scheduler-cls is {scheduler!r}: drop one of "
            "them."
        )


def _more_than_one(name: str) -> Find:
    def find(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
        value = getattr(vllm_config.parallel_config, name)
        if value > 1:
            yield f"--{name.replace('_', '-')} is {value}: set it to 1."

    return find


def _ubatching(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    if vllm_config.parallel_config.use_ubatching:
        yield "Dual batch overlap splits the tree's rows: drop --enable-dbo and --ubatch-size."


def _sharded_sampling(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    if vllm_config.parallel_config.enable_batch_sharded_sampling:
        yield "--enable-batch-sharded-sampling splits the tree's rows: drop it."


def _levels(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    if is_block(tree, vllm_config.speculative_config):
        return
    scheduler = vllm_config.scheduler_config
    rows, most = scheduler.max_num_seqs * tree.topk, scheduler.max_num_batched_tokens
    if rows > most:
        yield (
            f"A level of the draft has {rows} rows (--max-num-seqs {scheduler.max_num_seqs} times "
            f"{flag('tree', 'topk')} {tree.topk}), but --max-num-batched-tokens is {most}: set "
            f"--max-num-seqs to {most // tree.topk} or less, or --max-num-batched-tokens to "
            f"{rows} or more."
        )


def _lora_rows(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    # vLLM checks this while num_speculative_tokens is still the depth.
    if tree.nodes is None or getattr(vllm_config, "lora_config", None) is None:
        return
    scheduler = vllm_config.scheduler_config
    rows, most = scheduler.max_num_seqs * (tree.nodes + 1), scheduler.max_num_batched_tokens
    if rows > most:
        yield (
            "With LoRA, --max-num-batched-tokens must be at least --max-num-seqs times the rows "
            f"of a tree, {rows}, but it is {most}: raise it, or lower {flag('tree', 'nodes')}."
        )


def _instead(feature: Feature, topk: str) -> str:
    """What to do about a feature that no family serves; `topk` is how to name the key."""
    remedies = [f"set {topk} to 1 for a chain"] if feature.chain else ["serve another target"]
    return ", or ".join([*remedies, *filter(None, [feature.or_else])])


def _of_target(feature: Feature) -> Find:
    def find(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
        model = target_of(vllm_config)
        if model is None or (feature.chain and tree.topk == 1):
            return
        if says := feature.in_model(model):
            remedy = _instead(feature, flag("tree", "topk"))
            yield f"The target {says}: {remedy}, or drop {flag('tree')}."

    return find


def _hot_tokens(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    model, hot = target_of(vllm_config), tree.hot_tokens
    if model is None or hot is None:
        return
    name, topk = flag("tree", "hot_tokens"), f"{flag('tree', 'topk')} {tree.topk}"
    draft = getattr(vllm_config.speculative_config.draft_model_config, "hf_config", None)
    if isinstance(hot, int):
        vocabulary = getattr(draft, "draft_vocab_size", None) or model.get_vocab_size()
        if not tree.topk <= hot < vocabulary:
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
    if listed < tree.topk:
        yield f"{name}: {hot!r} lists {listed} tokens, fewer than {topk}: list more tokens."


def _two_heads(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    # Since vLLM 0.33.
    theirs = getattr(vllm_config.speculative_config, "draft_lm_head_quantization", None)
    if theirs is not None and tree.head_dtype != "auto":
        yield (
            f"{flag('tree', 'head_dtype')} is {tree.head_dtype!r} beside "
            f"--speculative-config.draft_lm_head_quantization {theirs!r}: both replace the draft's "
            "output head. Keep one of them."
        )


def _head_dtype(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    # The frontend must not initialise CUDA: vLLM's platform asks NVML for the capability.
    from vllm.platforms import current_platform

    if tree.head_dtype != "fp8" or current_platform.device_type != "cuda":
        return  # A CPU has emulated products of FP8 numbers.
    needs = f"{flag('tree', 'head_dtype')} is 'fp8', which needs an NVIDIA GPU of compute"
    capability = current_platform.get_device_capability()
    if not current_platform.is_cuda():
        yield f"{needs} capability 8.9 or later: set it to 'auto'."
    elif capability is not None and (capability.major, capability.minor) < (8, 9):
        found = capability.as_version_str()
        yield f"{needs} capability 8.9 or later, but this one has {found}: set it to 'auto'."


def _flash(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    if tree.attention != "flash":
        return
    model = target_of(vllm_config)
    if reason := _no_flash(vllm_config.attention_config) or (
        "there is one kernel for the latents of MLA" if model is not None and model.use_mla else ""
    ):
        yield (
            f"{flag('tree', 'attention')} is 'flash', but {reason}: set it to 'auto' or 'triton'."
        )


def _no_flash(config: Any) -> str | None:
    """Why no layer can have FlashAttention 3, as far as that is known without a layer."""
    from vllm import envs
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return f"the platform {current_platform.device_type} has no FlashAttention 3"
    backend = getattr(config.backend, "name", None)
    if backend not in (None, "FLASH_ATTN"):
        return f"the attention backend is {backend}, not FLASH_ATTN"
    if config.flash_attn_version not in (None, 3):
        return f"attention_config.flash_attn_version is {config.flash_attn_version}, not 3"
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT is set, and splits depend on the batch"
    capability = current_platform.get_device_capability()
    # As in vllm_flash_attn/flash_attn_interface.py.
    if capability is not None and capability.major != 9:
        found = capability.as_version_str()
        return f"FlashAttention 3 is for compute capability 9, and this device has {found}"
    return None


def _given_to_target(name: str, sentence: str) -> Find:
    def find(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
        model = target_of(vllm_config)
        if model is not None and getattr(model, name):
            yield f"--{name.replace('_', '-')} {sentence}."

    return find


def _backend(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    # None is vLLM's own choice, which is known with the layers.
    chosen = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    name = getattr(chosen, "name", None)
    model = target_of(vllm_config)
    latent = model is not None and getattr(model, "use_mla", False)
    if latent and name not in (None, *BACKENDS, *LATENT_BACKENDS):
        yield (
            f"The attention backend is {name}, but trees on MLA need one of "
            f"{', '.join(LATENT_BACKENDS)}: pass --attention-backend TRITON_MLA."
        )
    elif not latent and name not in (None, *BACKENDS):
        yield (
            f"The attention backend is {name}, but trees need one of {', '.join(BACKENDS)}: pass "
            "--attention-backend FLASH_ATTN or --attention-backend TRITON_ATTN."
        )


def _kv_format(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    dtype = getattr(getattr(vllm_config, "cache_config", None), "cache_dtype", "auto")
    if dtype not in KV_DTYPES:
        yield (
            f"--kv-cache-dtype is {dtype}, which tree attention does not read: use one of "
            f"{', '.join(KV_DTYPES)}."
        )


def _watermark(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    if vllm_config.watermark_config is not None:
        yield "Watermarking reads a chain's history: drop --watermark-config."


def _connector(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return
    offers = manager.manager().offers("graft_kv_connectors")
    safe = [each.entry.name for each in offers if getattr(each.entry, "stores_after_step", False)]
    if transfer.kv_connector not in safe:
        yield (
            f"The KV connector {transfer.kv_connector} may save blocks before they are compacted: "
            f"use {' or '.join(safe)}, or drop --kv-transfer-config."
        )


_ONE_RANK = "A request's rows are split over ranks, and a tree needs all of them."
_HISTORY = "It reads a row's history from the rows before it, which in a tree are other branches."

_ENGINE: tuple[Refusal, ...] = (
    Refusal(
        "more than 63 nodes, or more than `topk` and `steps` hold",
        "An ancestor mask has 64 bits, one of them the root's.",
        "lower `num_speculative_tokens`",
        _nodes,
    ),
    Refusal(
        "`ngram` with chains: `topk: 1`, or a target that verifies no trees",
        "N-grams are branches beside the draft's.",
        "drop `ngram`, or raise `topk`",
        _ngram,
    ),
    Refusal(
        "Model Runner V1",
        "It has no place for verification and compaction.",
        "unset `VLLM_USE_V2_MODEL_RUNNER`, and drop what V2 does not support",
        _runner,
    ),
    Refusal(
        "pipeline parallelism",
        "The draft runs on the last rank, and the accepted path is not sent to the others.",
        "set `--pipeline-parallel-size` to 1",
        _more_than_one("pipeline_parallel_size"),
    ),
    Refusal(
        "decode context parallelism",
        _ONE_RANK,
        "set `--decode-context-parallel-size` to 1",
        _more_than_one("decode_context_parallel_size"),
    ),
    Refusal(
        "prefill context parallelism",
        _ONE_RANK,
        "set `--prefill-context-parallel-size` to 1",
        _more_than_one("prefill_context_parallel_size"),
    ),
    Refusal(
        "dual batch overlap",
        "It splits the tree's rows.",
        "drop `--enable-dbo` and `--ubatch-size`",
        _ubatching,
    ),
    Refusal(
        "batch-sharded sampling",
        "It splits the tree's rows.",
        "drop `--enable-batch-sharded-sampling`",
        _sharded_sampling,
    ),
    Refusal(
        "`cudagraph_mode: FULL`",
        "Its graphs of mixed batches would put prompts through tree attention.",
        "use `FULL_AND_PIECEWISE`, where mixed batches have graphs of ours",
        _full_graphs,
    ),
    Refusal(
        "more rows per level (`max_num_seqs` times `topk`) than `max_num_batched_tokens`",
        "vLLM sizes its buffers for that many rows.",
        "raise `--max-num-batched-tokens`, or lower one of the others",
        _levels,
    ),
    Refusal(
        "LoRA with more rows (`max_num_seqs` times `nodes` + 1) than `max_num_batched_tokens`",
        "vLLM sizes its buffers of adapters for that many rows.",
        "raise `--max-num-batched-tokens`, or lower `nodes`",
        _lora_rows,
    ),
    Refusal(
        "`shape: auto` with data parallelism",
        "vLLM drops its number of drafts by batch size there, so ranks would choose differently.",
        "set `shape: fixed`",
        _auto_replicas,
    ),
    Refusal(
        "`shape: auto` with a `--scheduler-cls`",
        "The choice is made in vLLM's own scheduler.",
        "drop one of them",
        _auto_scheduler,
    ),
)

_REQUESTS: tuple[Refusal, ...] = (
    Refusal(
        "attention backends other than FLASH_ATTN, TRITON_ATTN and CPU_ATTN, and for MLA other "
        "than TRITON_MLA, FLASH_ATTN_MLA, FLASHMLA and CPU_MLA",
        "The tree kernels read the layout of their K/V cache.",
        "pass `--attention-backend FLASH_ATTN` or `TRITON_ATTN`, and for MLA `TRITON_MLA`",
        _backend,
    ),
    Refusal(
        "K/V in other formats than 16 or 32 bits and fp8 (e4m3)",
        "The tree kernel does not read them.",
        "set `--kv-cache-dtype` to `auto`, `bfloat16`, `float16` or `fp8`",
        _kv_format,
    ),
    Refusal(
        "adaptive verification",
        "It shortens a chain by a confidence that a tree's nodes don't have.",
        "set `enable_adaptive_verification` to false",
        _set_in_speculative_config("enable_adaptive_verification", "needs a chain"),
    ),
    Refusal(
        "probabilistic drafts (`draft_sample_method`)",
        "Verification of trees is exact without draft probabilities.",
        "drop the key",
        _sampled_drafts,
    ),
    Refusal(
        "rejection methods other than `standard`",
        "A tree has its own verification.",
        "set `rejection_sample_method` to `standard`",
        _rejection,
    ),
    Refusal(
        "`use_local_argmax_reduction`",
        "It keeps one token per row, and a tree needs the best `topk`.",
        "set it to false",
        _set_in_speculative_config("use_local_argmax_reduction", "keeps one token"),
    ),
    Refusal(
        "`hot_tokens` that do not fit the draft",
        "A level needs at least `topk` tokens of the draft's vocabulary.",
        "give another number or file",
        _hot_tokens,
    ),
    Refusal(
        "`head_dtype: fp8` beside `draft_lm_head_quantization`",
        "Both replace the draft's output head by a copy of fewer bits.",
        "keep one of them",
        _two_heads,
    ),
    Refusal(
        "`head_dtype: fp8` below compute capability 8.9",
        "These GPUs have no products of FP8 numbers.",
        "set `head_dtype: auto`",
        _head_dtype,
    ),
    Refusal(
        "`attention: flash` without FlashAttention 3, or with MLA",
        "The keys before the tree are attended by vLLM's own FlashAttention 3; our kernel for MLA "
        "attends all keys.",
        "set `attention: auto`",
        _flash,
    ),
    Refusal(
        "custom logits processors",
        _HISTORY,
        "drop `--logits-processors`, and uninstall plugins that bring some",
        _given_to_target("logits_processors", "may read a chain's history: drop them"),
    ),
    Refusal("watermarks", _HISTORY, "drop `--watermark-config`", _watermark),
    Refusal(
        "`--return-sampling-mask`",
        "It follows a chain's rows, not a tree's path.",
        "drop it",
        _given_to_target("return_sampling_mask", "is not computed along a tree's path: drop it"),
    ),
    Refusal(
        "`--enable-trace-replay`",
        "It follows a chain's rows, not a tree's path.",
        "drop it",
        _given_to_target("enable_trace_replay", "forces a chain's tokens: drop it"),
    ),
    Refusal(
        "KV connectors other than ours",
        "They may save blocks before the accepted path has been moved into them.",
        "use `HiCacheConnector`",
        _connector,
    ),
)


def shape_problems(vllm_config: Any) -> list[str]:
    """Why the shape can't be ``auto``."""
    auto = TreeConfig(shape="auto")
    checks = (_auto_replicas, _auto_scheduler, auto_widths)
    return [problem for check in checks for problem in check(auto, vllm_config)]


def level_problems(tree: TreeConfig, vllm_config: Any) -> list[str]:
    """Why the levels of a tree do not fit into ``max_num_batched_tokens``."""
    return list(_levels(tree, vllm_config))


def head_problems(vllm_config: Any) -> list[str]:
    """Why the draft's head can't be in FP8, or is no faster."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return [f"The platform {current_platform.device_type} has no products of FP8 numbers."]
    draft = vllm_config.speculative_config.draft_model_config
    if str(getattr(draft, "dtype", "")) == "torch.float32":
        return ["The draft computes in float32."]
    fp8 = TreeConfig(head_dtype="fp8")
    return [
        *_head_dtype(fp8, vllm_config),
        *_two_heads(fp8, vllm_config),
        *own_head_problems(fp8, vllm_config),
    ]


def refusals() -> tuple[Refusal, ...]:
    """Every refusal, without the features of targets that some family serves."""
    served = served_features()
    targets = (
        Refusal(
            f"targets with {feature.name}",
            feature.why,
            _instead(feature, "`topk`"),
            _of_target(feature),
        )
        for feature in FEATURES
        if feature.name not in served
    )
    return (*DRAFTS, *BLOCKS, *_ENGINE, *STATES, *targets, *_REQUESTS)
