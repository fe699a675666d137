"""Exclusions of the verification of trees: kernels, K/V formats, heads, samplers, connectors."""

from collections.abc import Iterator
from typing import Any

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.options import flag, target_of
from vllm_graft.base.refusal import Found, Refusal, Refusals, sentences, setting
from vllm_graft.hooks import manager
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.models.drafts import draft_vocabulary
from vllm_graft.spec_decode.refusals.draft_refusals import own_scores
from vllm_graft.spec_decode.targets.dense.dense_features import BACKENDS, KV_DTYPES
from vllm_graft.spec_decode.targets.latent.latent_features import LATENT_BACKENDS

_HISTORY = "It reads a row's history from the rows before it, which in a tree are other branches."
_PATH = "It follows a chain's rows, not a tree's path."
_HEAD, _HOT = flag("tree", "head_dtype"), flag("tree", "hot_tokens")

DENSE_BACKEND = "pass `--attention-backend FLASH_ATTN` or `--attention-backend TRITON_ATTN`"
LATENT_BACKEND = "pass `--attention-backend TRITON_MLA`"

VERIFICATION = Refusals()


@VERIFICATION.row(
    f"attention backends other than {', '.join(BACKENDS)}, and for MLA other than "
    f"{', '.join(LATENT_BACKENDS)}",
    "The tree kernels read the layout of their K/V cache.",
    f"{DENSE_BACKEND}, and for MLA {LATENT_BACKEND}",
)
def _backend(tree: TreeConfig, vllm_config: Any) -> Iterator[Found]:
    # None is vLLM's own choice, which is known with the layers.
    chosen = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    name, model = getattr(chosen, "name", None), target_of(vllm_config)
    latent = model is not None and getattr(model, "use_mla", False)
    known = (*BACKENDS, *LATENT_BACKENDS) if latent else BACKENDS
    if name not in (None, *known):
        what, those = ("trees on MLA", LATENT_BACKENDS) if latent else ("trees", BACKENDS)
        yield Found(
            f"--attention-backend is {name}, but {what} need one of {', '.join(those)}",
            (LATENT_BACKEND if latent else DENSE_BACKEND).replace("`", ""),
        )


@VERIFICATION.row(
    "K/V in other formats than 16 or 32 bits and fp8 (e4m3)",
    "The tree kernel does not read them.",
    f"set `--kv-cache-dtype` to one of {', '.join(KV_DTYPES)}",
)
def _kv_format(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    dtype = getattr(getattr(vllm_config, "cache_config", None), "cache_dtype", "auto")
    if dtype not in KV_DTYPES:
        yield f"--kv-cache-dtype is {dtype}"


VERIFICATION.extend(
    (
        Refusal(
            "adaptive verification",
            "It shortens a chain by a confidence that a tree's nodes don't have.",
            "set `speculative_config.enable_adaptive_verification` to false",
            setting("speculative_config.enable_adaptive_verification"),
        ),
        Refusal(
            "probabilistic drafts (`draft_sample_method`)",
            "Verification of trees is exact without draft probabilities.",
            "drop `speculative_config.draft_sample_method`",
            setting("speculative_config.draft_sample_method", lambda way: way == "greedy"),
        ),
        Refusal(
            "rejection methods other than `standard`",
            "A tree has its own verification.",
            "set `speculative_config.rejection_sample_method` to 'standard'",
            setting("speculative_config.rejection_sample_method", lambda way: way == "standard"),
        ),
        Refusal(
            "`use_local_argmax_reduction`",
            "It keeps one token per row, and a tree needs the best `topk`.",
            "set `speculative_config.use_local_argmax_reduction` to false",
            setting("speculative_config.use_local_argmax_reduction"),
        ),
        Refusal(
            "custom logits processors",
            _HISTORY,
            "drop `--logits-processors`, and uninstall plugins that bring some",
            setting("model_config.logits_processors"),
        ),
        Refusal(
            "watermarks",
            _HISTORY,
            "drop `--watermark-config`",
            setting("watermark_config", lambda given: given is None, "--watermark-config is given"),
        ),
        Refusal(
            "`--return-sampling-mask`",
            _PATH,
            "drop `--return-sampling-mask`",
            setting("model_config.return_sampling_mask"),
        ),
        Refusal(
            "`--enable-trace-replay`",
            _PATH,
            "drop `--enable-trace-replay`",
            setting("model_config.enable_trace_replay"),
        ),
    )
)


@VERIFICATION.row(
    "`hot_tokens` that do not fit the draft",
    "The levels of a tree choose from these tokens of the draft's vocabulary.",
    f"give `{_HOT}` another number or file, or drop it",
)
def _hot_tokens(tree: TreeConfig, vllm_config: Any) -> Iterator[Found | str]:
    model, hot = target_of(vllm_config), tree.hot_tokens
    if model is None or hot is None:
        return
    topk = f"{flag('tree', 'topk')} {tree.topk}"
    if isinstance(hot, int):
        vocabulary = draft_vocabulary(vllm_config)
        if not tree.topk <= hot < vocabulary:
            yield Found(
                f"{_HOT} is {hot}, but must be at least {topk} and less than the draft's "
                f"vocabulary of {vocabulary} tokens",
                f"set {_HOT} to a quarter of it, say, or drop it",
            )
        return
    # torch is here already, and Triton must not be.
    from vllm_graft.spec_decode.heads.hot_tokens import load_hot_tokens

    try:
        listed = len(load_hot_tokens(hot, model.get_vocab_size()))
    except ConfigError as error:
        yield str(error)
        return
    if listed < tree.topk:
        yield f"{_HOT}: {hot!r} lists {listed} tokens, fewer than {topk}"


@VERIFICATION.row(
    "`head_dtype: fp8` beside `draft_lm_head_quantization`",
    "Both replace the draft's output head by a copy of fewer bits.",
    f"drop `{_HEAD}` or `speculative_config.draft_lm_head_quantization`",
)
def _two_heads(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    # Since vLLM 0.33.
    theirs = getattr(vllm_config.speculative_config, "draft_lm_head_quantization", None)
    if theirs is not None and tree.head_dtype != "auto":
        yield (
            f"{_HEAD} is {tree.head_dtype!r}, and speculative_config.draft_lm_head_quantization is "
            f"{theirs!r}"
        )


@VERIFICATION.row(
    "`head_dtype: fp8` on GPUs that are not NVIDIA's, or below compute capability 8.9",
    "FP8 products need an NVIDIA GPU of compute capability 8.9 or later.",
    f"set `{_HEAD}` to 'auto'",
)
def _head_dtype(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    # The frontend must not initialise CUDA: vLLM's platform asks NVML for the capability.
    from vllm.platforms import current_platform

    if tree.head_dtype != "fp8" or current_platform.device_type != "cuda":
        return  # A CPU has emulated products of FP8 numbers.
    capability = current_platform.get_device_capability()
    if not current_platform.is_cuda():
        yield f"{_HEAD} is 'fp8', and this device is not NVIDIA's"
    elif capability is not None and (capability.major, capability.minor) < (8, 9):
        yield f"{_HEAD} is 'fp8', and this device has capability {capability.as_version_str()}"


@VERIFICATION.row(
    "`attention: flash` without FlashAttention 3, or with MLA and K/V in FP8",
    "The keys before the tree are attended by vLLM's own FlashAttention 3, which takes latents in "
    "16 bits.",
    f"set `{flag('tree', 'attention')}` to 'auto' or 'triton'",
)
def _flash(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    if tree.attention != "flash":
        return
    model = target_of(vllm_config)
    latents = model is not None and model.use_mla
    if reason := _no_flash(vllm_config, latents=latents):
        yield f"{flag('tree', 'attention')} is 'flash', but {reason}"


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
            return f"K/V of MLA is in {cache_dtype}"
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


@VERIFICATION.row(
    "KV connectors other than ours beside recurrent layers",
    "Nobody has tried whether a state that they send is one of accepted tokens.",
    "use HiCacheConnector, or drop `--kv-transfer-config`",
)
def _connector(tree: TreeConfig, vllm_config: Any) -> Iterator[Found]:
    model, transfer = target_of(vllm_config), vllm_config.kv_transfer_config
    if transfer is None or not getattr(model, "is_hybrid", False):
        return
    ours = [each.entry.name for each in manager.manager().offers("graft_kv_connectors")]
    below = transfer.kv_connector_extra_config.get("connectors") or ()
    names = {each.get("kv_connector") for each in below} or {transfer.kv_connector}
    for name in sorted(map(str, names - set(ours))):
        yield Found(
            f"--kv-transfer-config.kv_connector is {name!r}, and the target has recurrent layers",
            f"use {' or '.join(ours)}, or drop --kv-transfer-config",
        )


def head_problems(vllm_config: Any) -> list[str]:
    """Why the draft's head can't be in FP8, or is no faster."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return [f"The platform {current_platform.device_type} has no products of FP8 numbers."]
    draft = vllm_config.speculative_config.draft_model_config
    if str(getattr(draft, "dtype", "")) == "torch.float32":
        return ["The draft computes in float32."]
    rows = (_head_dtype, _two_heads, own_scores)
    return list(sentences(rows, TreeConfig(head_dtype="fp8"), vllm_config))
