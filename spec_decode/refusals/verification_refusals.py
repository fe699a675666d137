"""What the verification of trees excludes: kernels, K/V formats, heads, samplers, connectors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.options import flag, target_of
from vllm_graft.base.refusal import Find, Refusal
from vllm_graft.hooks import manager
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.models.draft_facts import draft_vocabulary
from vllm_graft.spec_decode.refusals.block_refusals import own_head_problems
from vllm_graft.spec_decode.targets.dense.dense_features import BACKENDS, KV_DTYPES
from vllm_graft.spec_decode.targets.latent.latent_features import LATENT_BACKENDS


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


def _hot_tokens(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    model, hot = target_of(vllm_config), tree.hot_tokens
    if model is None or hot is None:
        return
    name, topk = flag("tree", "hot_tokens"), f"{flag('tree', 'topk')} {tree.topk}"
    if isinstance(hot, int):
        vocabulary = draft_vocabulary(vllm_config)
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
    latents = model is not None and model.use_mla
    if reason := _no_flash(vllm_config, latents=latents):
        yield (
            f"{flag('tree', 'attention')} is 'flash', but {reason}: set it to 'auto' or 'triton'."
        )


def _no_flash(vllm_config: Any, *, latents: bool) -> str | None:
    """Why no layer can have FlashAttention 3, as far as that is known without a layer."""
    from vllm import envs
    from vllm.platforms import current_platform

    config = vllm_config.attention_config
    if not current_platform.is_cuda():
        return f"the platform {current_platform.device_type} has no FlashAttention 3"
    backend = getattr(config.backend, "name", None)
    if latents:
        # It reads the latents of every backend of MLA, but not those in FP8.
        cache_dtype = vllm_config.cache_config.cache_dtype
        if cache_dtype.startswith("fp8"):
            return f"FlashAttention 3 takes no latents in {cache_dtype}"
    elif backend not in (None, "FLASH_ATTN"):
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


_HISTORY = "It reads a row's history from the rows before it, which in a tree are other branches."

VERIFICATION: tuple[Refusal, ...] = (
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
        "`attention: flash` without FlashAttention 3, or with MLA and K/V in FP8",
        "The keys before the tree are attended by vLLM's own FlashAttention 3, which takes latents "
        "in 16 bits.",
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
