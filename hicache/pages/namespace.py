"""The namespace: 16 bytes that differ whenever the same page bytes could mean something else. A
block's hash covers its tokens. The namespace covers everything else that decides what the bytes of
a page mean: the rows of :data:`INPUTS`. KV is shared only within a namespace."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_graft.base.log import logger
from vllm_graft.hicache.pages.checkpoint import (
    PROCESSORS,
    commit_of,
    file_hash,
    file_hashes,
    weights_of,
)
from vllm_graft.hicache.pages.page_key import FORMAT, NAMESPACE_BYTES
from vllm_graft.seams.compare import vllm_version

NAMESPACE_START = NAMESPACE_BYTES // 2
"""Length of a namespace's first half, which is known before the model is loaded."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class Engine:
    """What the inputs are read from.

    Attributes:
        weights: the user's own identity of the weights; None to read the checkpoint.
        options: options of the user that change the pages.
        kv_cache_config: vLLM's; None before the model is loaded.
        attention: see :func:`~vllm_graft.hicache.pages.engine_core.ask_attention`.
        layout: how the host lays pages out, and what else only a loaded model tells.
        common: whether replicas of data parallelism have one namespace.
    """

    vllm_config: Any
    weights: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    kv_cache_config: Any = None
    attention: Mapping[str, Sequence[str]] | None = None
    layout: Mapping[str, Any] = field(default_factory=dict)
    common: bool = False

    def models(self) -> dict[str, Any]:
        """The configurations of the target and, if it has one, of the draft."""
        found = {"target": self.vllm_config.model_config}
        draft = getattr(self.vllm_config.speculative_config, "draft_model_config", None)
        return found if draft is None else {**found, "draft": draft}

    def loader_of(self, model: Any) -> Any:
        """The ``LoadConfig`` of a model: a draft may have one of its own."""
        speculative = self.vllm_config.speculative_config
        own = getattr(speculative, "draft_load_config", None)
        is_draft = model is getattr(speculative, "draft_model_config", None)
        return own if is_draft and own is not None else self.vllm_config.load_config


@dataclass(frozen=True)
class Input:
    """One input of K/V, which JSON or :func:`str` can write, and its text in ``docs/hicache.md``.
    ``early`` ones are known before the model is loaded."""

    name: str
    says: str
    read: Callable[[Engine], Any]
    early: bool = True


def nobody_else() -> str:
    """A value that no other engine has, for what cannot be told from others."""
    return os.urandom(NAMESPACE_BYTES).hex()


def _each(read: Callable[[Any, Engine], Any]) -> Callable[[Engine], Any]:
    return lambda engine: {role: read(model, engine) for role, model in engine.models().items()}


def _field(owner: str, *names: str) -> Callable[[Engine], Any]:
    """Read fields of a configuration; None for those that this vLLM does not have."""
    return lambda engine: [
        getattr(getattr(engine.vllm_config, owner, None), name, None) for name in names
    ]


def _config(model: Any, engine: Engine) -> dict[str, Any]:
    """The model's configuration, in which vLLM has put ``--hf-overrides`` and rope already."""
    found = dict(model.hf_config.to_dict())
    # Neither the place of the files nor an update of "transformers" changes the pages of text.
    for key in ("_name_or_path", "transformers_version"):
        found.pop(key, None)
    return found


def _longest(model: Any, engine: Engine) -> int:
    """The longest request, by which LongRoPE chooses its factors; else 0."""
    # See vLLM's phi3_long_rope_scaled_rope.py.
    long = "longrope" in json.dumps(_config(model, engine), default=str)
    return int(model.max_model_len) if long else 0


def _loader(model: Any, engine: Engine) -> list[Any]:
    loader = engine.loader_of(model)
    return [loader.load_format, loader.model_loader_extra_config]


def _code(model: Any, engine: Engine) -> list[Any]:
    runs = getattr(model, "trust_remote_code", False)
    return [file_hashes(model, ["*.py"]) if runs else {}, getattr(model, "model_impl", None)]


def _modalities(model: Any, engine: Engine) -> Any:
    """How images, video and sound become embeddings. vLLM's hash of an image does not cover it."""
    settings = getattr(model, "multimodal_config", None)
    if settings is None:
        return None
    import transformers

    names = (
        "mm_processor_kwargs",
        "media_io_kwargs",
        "video_pruning_rate",
        "mm_encoder_attn_dtype",
        "mm_encoder_fp8_scale_path",
    )
    return [
        file_hashes(model, PROCESSORS),
        transformers.__version__,
        [getattr(settings, name, None) for name in names],
        file_hash(getattr(settings, "mm_encoder_fp8_scale_path", None)),
    ]


def _backend(engine: Engine) -> str:
    config = getattr(engine.vllm_config, "attention_config", None)
    return str(getattr(config, "backend", None))


def _block_size(engine: Engine) -> int | None:
    """The block size if the user gave one. vLLM chooses others while it starts."""
    cache = engine.vllm_config.cache_config
    return cache.block_size if getattr(cache, "user_specified_block_size", False) else None


def _transfer(engine: Engine) -> str | None:
    """Weights that a trainer sends are on no disk."""
    return None if engine.vllm_config.weight_transfer_config is None else nobody_else()


def _adapters(engine: Engine) -> str | None:
    """Adapters: vLLM's hash of a block has an adapter's name and path, not its weights."""
    adapters = getattr(engine.vllm_config, "lora_config", None)
    return None if adapters is None else "kept out of storage"


def _device(engine: Engine) -> str:
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def _replica(engine: Engine) -> int | None:
    return None if engine.common else engine.vllm_config.parallel_config.data_parallel_index


def _pools(engine: Engine) -> list[Any]:
    return [
        [group.kv_cache_spec, group.kv_cache_spec.page_size_bytes, list(group.layer_names)]
        for group in engine.kv_cache_config.kv_cache_groups
    ]


def _hash_blocks(engine: Engine) -> list[Any]:
    """Tokens per hash. Since 0.33 a hash may cover tokens behind its block too."""
    ahead = getattr(engine.vllm_config, "num_hash_lookahead_tokens", 0)
    return [engine.kv_cache_config.hash_block_size, ahead]


def _ranks(engine: Engine) -> Any:
    """An engine that was not asked what its ranks run shares its pages with nobody."""
    return nobody_else() if engine.attention is None else dict(engine.attention)


_PARALLEL = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "cp_kv_cache_interleave_size",
    "enable_expert_parallel",
)

# fmt: off
INPUTS: tuple[Input, ...] = (
    Input("format", "the version of our records", lambda engine: FORMAT),
    Input("vLLM", "vLLM's version", lambda engine: vllm_version()),
    Input("device", "the kind of device", _device),
    Input("weights", "the weights of target and draft, or the text that `weights` gives", _each(weights_of)),
    Input("commit", "the commit of a snapshot in the Hugging Face cache", _each(lambda model, engine: commit_of(model))),
    Input("loader", "how weights are loaded: `--load-format`, `--model-loader-extra-config`", _each(_loader)),
    Input("config", "the models' configurations, with `--hf-overrides` and rope", _each(_config)),
    Input("longest request", "`--max-model-len`, if LongRoPE chooses by it", _each(_longest)),
    Input("code", "the Python files of a model with `--trust-remote-code`, and `--model-impl`", _each(_code)),
    Input("dtype", "the models' dtype", _each(lambda model, engine: model.dtype)),
    Input("quantization", "`--quantization` and its settings", _each(lambda model, engine: [model.quantization, getattr(model, "quantization_config", None)])),
    Input("modalities", "files and settings of processors of images and sound, and transformers' version", _each(_modalities)),
    Input("draft", "the method of speculation", lambda engine: getattr(engine.vllm_config.speculative_config, "method", None)),
    Input("LoRA", "whether there are adapters", _adapters),
    Input("weight transfer", "weights that a trainer sends: shared with nobody", _transfer),
    Input("KV dtype", "`--kv-cache-dtype` and its exceptions", _field("cache_config", "cache_dtype", "kv_cache_dtype_skip_layers")),
    Input("block size", "`--block-size`, if it was given", _block_size),
    Input("hash", "`--prefix-caching-hash-algo`", _field("cache_config", "prefix_caching_hash_algo")),
    Input("window", "`--disable-sliding-window`", _field("model_config", "disable_sliding_window")),
    Input("backend", "`--attention-backend`, as it was asked for", _backend),
    Input("layout", "`VLLM_KV_CACHE_LAYOUT`", lambda engine: os.environ.get("VLLM_KV_CACHE_LAYOUT")),
    Input("options", "the connector's `kv_layout` and `host_dtype`", lambda engine: dict(engine.options)),
    Input("parallel sizes", "tensor, pipeline, context and expert parallelism", _field("parallel_config", *_PARALLEL)),
    Input("replica", "the number of the data-parallel replica, for storage", _replica),
    Input("states", "dtypes of recurrent states", _field("cache_config", "mamba_cache_dtype", "mamba_ssm_cache_dtype"), early=False),
    Input("pools", "kinds, sizes and layers of the pools", _pools, early=False),
    Input("hash blocks", "how many tokens a hash covers", _hash_blocks, early=False),
    Input("pool layout", "the layout of the device's KV cache", lambda engine: engine.kv_cache_config.kv_cache_layout, early=False),
    Input("attention", "the attention that layers run with, as ranks tell it; on a CPU its instruction set", _ranks, early=False),
    Input("host layout", "how the host lays pages out", lambda engine: dict(engine.layout), early=False),
)
# fmt: on


def namespace(engine: Engine) -> bytes:
    """The namespace of an engine, whose model is loaded. It reads the checkpoint: call it once. Its
    first half is that of :func:`namespace_start`; it raises as :func:`weights_of`."""
    parts = {row.name: row.read(engine) for row in INPUTS}
    early = {row.name: parts[row.name] for row in INPUTS if row.early}
    found = digest(early)[:NAMESPACE_START] + digest(parts)[NAMESPACE_START:]
    logger.info("KV namespace %s.", found.hex())
    logger.debug("KV namespace %s is %s", found.hex(), parts)
    return found


def namespace_start(engine: Engine) -> bytes:
    """The first half of a namespace; the model need not be loaded. It raises as :func:`weights_of`.
    Engines share it if they differ only in what is known of a loaded model."""
    early = {row.name: row.read(engine) for row in INPUTS if row.early}
    return digest(early)[:NAMESPACE_START]


def digest(parts: Mapping[str, Any]) -> bytes:
    """16 bytes (BLAKE2b) of a nested mapping. The order of its keys does not count."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.blake2b(text.encode(), digest_size=NAMESPACE_BYTES).digest()


def _plain(value: Any) -> str:
    """A value that JSON does not know, as text without memory addresses."""
    return _ADDRESS.sub("", f"{type(value).__name__}:{value}")
