"""The namespace: 16 bytes that differ whenever the same page bytes could mean something else.

A block's hash covers its tokens. The namespace covers everything else: the weights and how they
were quantised, the model's configuration, the dtype and layout of the KV, the pools, the
parallelism, the hash algorithm, the version of vLLM, and the version of our record format. KV is
shared only within a namespace.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.log import logger
from vllm_graft.hicache.config.connector_options import option_flag
from vllm_graft.hicache.pages.page_key import FORMAT, NAMESPACE_BYTES
from vllm_graft.hicache.pages.weights import checkpoint_fingerprint

NAMESPACE_START = NAMESPACE_BYTES // 2
"""Length of a namespace's first half, which is known before the model is loaded."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def namespace(
    vllm_config: Any,
    kv_cache_config: Any,
    *,
    weights: str | None = None,
    asked: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> bytes:
    """The namespace of an engine's pages.

    It reads the checkpoint, so call it once per engine. The first half is that of
    :func:`namespace_start`; the second half covers everything.

    Args:
        vllm_config: the engine's ``VllmConfig``.
        kv_cache_config: the engine's ``KVCacheConfig``.
        weights: the user's own identity of the weights (a revision, a hash). If given, the files
            are not read. It stands for the draft model's weights too.
        asked: options of the user that change the pages.
        extra: whatever else changes a page's bytes: the host's layout and dtype, and the rank if a
            page does not hold the bytes of all ranks.

    Raises:
        ConfigError: if the weights are not on a local disk, and ``weights`` is not given.
    """
    known = _known_parts(vllm_config, weights, asked)
    parts = {**known, "kv": kv_parts(vllm_config, kv_cache_config), "extra": dict(extra or {})}
    found = digest(known)[:NAMESPACE_START] + digest(parts)[NAMESPACE_START:]
    logger.info("KV namespace %s.", found.hex())
    logger.debug("KV namespace %s is %s", found.hex(), parts)
    return found


def namespace_start(
    vllm_config: Any, *, weights: str | None = None, asked: Mapping[str, Any] | None = None
) -> bytes:
    """The first :data:`NAMESPACE_START` bytes of a namespace; the model need not be loaded.

    Engines share them if they differ only in what is known of a loaded model: its layers, their
    kinds and sizes. Arguments and errors are those of :func:`namespace`.
    """
    return digest(_known_parts(vllm_config, weights, asked))[:NAMESPACE_START]


def _known_parts(
    vllm_config: Any, weights: str | None, asked: Mapping[str, Any] | None
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "model": model_parts(vllm_config, weights),
        "geometry": geometry_parts(vllm_config),
        "asked": {**asked_parts(vllm_config), **(asked or {})},
    }


def digest(parts: Mapping[str, Any]) -> bytes:
    """16 bytes (BLAKE2b) of a nested mapping. The order of its keys does not count."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.blake2b(text.encode(), digest_size=NAMESPACE_BYTES).digest()


def model_parts(vllm_config: Any, weights: str | None) -> dict[str, Any]:
    """Weights and configuration of target and draft, and how they are loaded."""
    parts: dict[str, Any] = {"target": _model(vllm_config.model_config, vllm_config, weights)}
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None:
        parts["draft"] = _model(draft, vllm_config, weights)
        parts["draft_method"] = speculative.method
    if vllm_config.weight_transfer_config is not None:
        # Weights that are replaced while the engine runs are on no disk, so no other engine may
        # read this KV. (Within the engine, reset_prefix_cache(reset_connector=True) clears it.)
        parts["nonce"] = os.urandom(NAMESPACE_BYTES).hex()
    return parts


def kv_parts(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """Kinds, sizes and layers of the pools, the layout, and how blocks are hashed."""
    cache = vllm_config.cache_config
    return {
        "dtype": cache.cache_dtype,
        "hash": cache.prefix_caching_hash_algo,
        "hash_block": kv_cache_config.hash_block_size,
        # Since 0.33 a block's hash may cover tokens behind it; vLLM does so without a connector.
        "hash_lookahead": getattr(vllm_config, "num_hash_lookahead_tokens", 0),
        "layout": kv_cache_config.kv_cache_layout,
        "pools": [
            {
                "spec": _plain(group.kv_cache_spec),
                "page_bytes": group.kv_cache_spec.page_size_bytes,
                "layers": list(group.layer_names),
            }
            for group in kv_cache_config.kv_cache_groups
        ],
    }


def asked_parts(vllm_config: Any) -> dict[str, Any]:
    """The user's flags that change the pages of a model.

    They are taken as the user gave them, not as vLLM completes them while it starts. Otherwise the
    frontend and the engine would disagree.
    """
    cache, model = vllm_config.cache_config, vllm_config.model_config
    attention = getattr(vllm_config, "attention_config", None)
    specified = getattr(cache, "user_specified_block_size", False)
    return {
        "kv_dtype": cache.cache_dtype,
        "block_size": cache.block_size if specified else None,
        "backend": str(getattr(attention, "backend", None)),
        "layout": os.environ.get("VLLM_KV_CACHE_LAYOUT"),
        "no_window": getattr(model, "disable_sliding_window", False),
    }


def geometry_parts(vllm_config: Any) -> dict[str, Any]:
    """How a block's bytes are divided among ranks, and the number of the data-parallel replica.

    Replicas hold the same bytes. They still have separate namespaces, because one process at a time
    has a store open, and each replica has its own scheduler.
    """
    parallel = vllm_config.parallel_config
    return {
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "pcp": parallel.prefill_context_parallel_size,
        "dcp": parallel.decode_context_parallel_size,
        "expert_parallel": parallel.enable_expert_parallel,
        "replica": parallel.data_parallel_index,
    }


def _model(model: Any, vllm_config: Any, weights: str | None) -> dict[str, Any]:
    hf_config = model.hf_config.to_dict()
    # Neither the place of the files nor an update of "transformers" changes the pages.
    for key in ("_name_or_path", "transformers_version"):
        hf_config.pop(key, None)
    return {
        "weights": weights or _weights(model, vllm_config.load_config),
        "loader": _loader(vllm_config.load_config),
        "config": hf_config,
        "dtype": model.dtype,
        "quantization": model.quantization,
        "quantization_config": getattr(model, "quantization_config", None),
        # LongRoPE chooses its factors by max_len (vLLM's phi3_long_rope_scaled_rope.py).
        "max_len": model.max_model_len if "longrope" in json.dumps(hf_config, default=str) else 0,
        "vllm": _vllm(),
    }


def _loader(load_config: Any) -> dict[str, Any]:
    return {"format": load_config.load_format, "extra": load_config.model_loader_extra_config}


def _weights(model: Any, load_config: Any) -> str:
    """The identity of the weights: the commit on the Hub, or a fingerprint of local files."""
    if load_config.load_format == "dummy":
        return f"dummy {model.seed}"
    path = Path(model.model)
    try:
        if not path.exists():
            return _hub_weights(model)
        return checkpoint_fingerprint(path).hex()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{option_flag('weights')}: the weights of {model.model!r} can't be told "
            f"from others ({error}). Give a text that changes whenever they do, such as a revision."
        ) from error


def _hub_weights(model: Any) -> str:
    """The identity of a model on the Hub: its commit, whose files never change.

    Raises:
        OSError: if the commit or its files cannot be found without the network.
    """
    commit = getattr(model.revision, "resolved", None) or model.revision
    if commit is not None and _COMMIT.fullmatch(commit):
        return f"{model.model} {commit}"
    from huggingface_hub import snapshot_download

    snapshot = snapshot_download(model.model, revision=model.revision, local_files_only=True)
    return checkpoint_fingerprint(Path(snapshot)).hex()


def _vllm() -> list[str]:
    """vLLM's version and the kind of device. Other kernels may order a page's bytes differently."""
    import vllm
    from vllm.platforms import current_platform

    return [vllm.__version__, current_platform.device_type]


def _plain(value: Any) -> str:
    """A value that JSON does not know, as text without memory addresses."""
    return _ADDRESS.sub("", f"{type(value).__name__}:{value}")
