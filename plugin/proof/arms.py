"""The two engines of a proof: the parts that the flags ask for, and none of them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_graft.base.options import KEY
from vllm_graft.hicache.config.cache_config import extra_configs
from vllm_graft.hicache.config.connector_options import CONNECTOR
from vllm_graft.hicache.config.nonce import without_nonce
from vllm_graft.proof import images, questions
from vllm_graft.proof.tiny_config import TinyConfig, text_of
from vllm_graft.spec_decode.config.tree_config import memory_section

FORMAT = "graft_proof"
"""Value of vLLM's ``--load-format`` for random weights."""

_TOPK, _DEPTH, _NODES = 8, 4, 15
_HOST_TOKENS = 640
"""Tokens that the host cache has room for: fewer than the proof's prompts have."""

_SEEN_SOON = {"min_hits": 2, "capture_share": 1, "max_patches": 1024, "buckets": [512, 1024]}
"""Vision graphs of few sizes, which are captured while a proof lasts."""

_KEPT = (
    *("block_size", "trust_remote_code", "attention_backend", "kv_cache_dtype", "enforce_eager"),
    *("mm_encoder_attn_backend", "mm_processor_kwargs", "enable_lora", "max_loras"),
    *("max_lora_rank", "enable_tower_connector_lora"),
)
"""Arguments of vLLM's engine that both engines are given as the flags say."""


@dataclass(frozen=True)
class Arms:
    """Options of ``vllm.LLM`` for both engines, which compute in `dtype`: `alone` are those without
    our parts, and without drafts unless they are vLLM's own chains. `wanted` has the counters of
    the other engine that have to be above 0, and what they count. `look` makes requests about
    images; None if these engines take none."""

    target: Path
    dtype: str
    alone: dict[str, Any]
    asked: dict[str, Any]
    wanted: dict[str, str]
    look: questions.Look | None = None


def make_arms(engine: Any, vllm_config: Any, parts: set[str], folder: Path) -> Arms:
    """Write tiny models into an empty folder; say how both engines are built, from vLLM's
    ``EngineArgs`` of the flags, their configuration, and the names of our parts in it."""
    from vllm.platforms import current_platform

    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    own = _draft_of(vllm_config)
    tiny = TinyConfig(_config(model.model), _config(own) if own else None)
    target, on_cpu = _write(folder / "target", tiny.target()), current_platform.is_cpu()
    # On a CPU, float32 runs in the same kernels.
    dtype = "float32" if on_cpu else str(model.dtype).removeprefix("torch.")
    alone = {
        "load_format": FORMAT,
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "max_model_len": questions.MODEL_LENGTH,
        "max_num_seqs": questions.REQUESTS,
        "max_num_batched_tokens": questions.BATCH_TOKENS,
        # Blocks of recurrent states hold more tokens than a step of the proof.
        "enable_prefix_caching": not model.is_hybrid,
        "disable_log_stats": False,
        "distributed_executor_backend": "uni",
        "kv_cache_memory_bytes": 2**28,
        "seed": 0,
        **{name: value for name in _KEPT if (value := getattr(engine, name, None))},
    }
    if not on_cpu:
        # A server may run beside it.
        alone["gpu_memory_utilization"] = 0.2
    look = _take_images(vllm_config, parts, target, alone) if model.is_multimodal_model else None
    others = dict(vllm_config.additional_config or {})
    given = others.pop(KEY, {})
    if others:
        alone["additional_config"] = others
    asked, wanted = dict(alone), {"vllm:num_preemptions": "preemptions"}
    if not on_cpu and not engine.enforce_eager:
        # The other one starts sooner without, and what graphs replay is proven by it.
        asked["compilation_config"] = _few_graphs(vllm_config.compilation_config)
        alone["enforce_eager"] = True
    if engine.async_scheduling is not None:
        asked["async_scheduling"] = engine.async_scheduling
    sections = {name: dict(each) for name, each in given.items() if name in parts}
    if speculative is not None:
        asked["speculative_config"] = drafts = _drafts(sections.get("tree"), speculative)
        if "tree" not in sections:
            # VLLM samples its own chains with other noise than a token at a time.
            alone["speculative_config"] = drafts
        wanted["vllm:spec_decode_num_accepted_tokens"] = "accepted drafts"
        if memory_section(sections.get("tree", {}).get("memory")) is not None:
            wanted["vllm:graft_tree_memory_nodes_accepted"] = "drafts from other requests' texts"
        if own:
            drafts["model"] = str(_write(folder / "draft", tiny.draft(speculative.method)))
    asked["additional_config"] = {**others, KEY: sections}
    if "hicache" in parts:
        asked["kv_transfer_config"] = _transfer(vllm_config, tiny, dtype, folder, wanted)
    if "vit" in parts:
        sections["vit"] |= _SEEN_SOON
        wanted["vllm:graft_vit_replays/exact"] = "replays of exact vision graphs"
    return Arms(target, dtype, alone, asked, wanted, look)


def _take_images(
    vllm_config: Any, parts: set[str], target: Path, options: dict[str, Any]
) -> questions.Look | None:
    """Let engines with these options take images, if a part has to do with them. Returns what makes
    requests about images; None if these engines take none."""
    if not parts & {"vit", "hicache"}:
        options["language_model_only"] = True
        return None
    model = vllm_config.model_config
    images.link_processor(model, target)
    options |= images.OPTIONS
    options["max_model_len"] = min(images.LENGTH, model.max_model_len)
    looking = images.Looking(vllm_config)
    return looking if looking.sees else None


def _few_graphs(served: Any) -> dict[str, Any]:
    """CUDA graphs that one request and a full batch fill, without torch.compile's time. What lies
    between is padded, as in a server."""
    rows = (1, _TOPK, _NODES + 1)
    sizes = {count * each for count in (1, questions.REQUESTS) for each in rows}
    mode = served.cudagraph_mode.name
    return {"mode": 0, "cudagraph_mode": mode, "cudagraph_capture_sizes": sorted(sizes)}


def _draft_of(vllm_config: Any) -> str:
    """Folder or name of a draft model that is no part of the target; empty if there is none."""
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    model = getattr(draft, "model", "")
    return "" if model == vllm_config.model_config.model else model


def _config(model: str) -> dict[str, Any]:
    """What a model's ``config.json`` holds, as its folder, the cache or the Hub has it."""
    from transformers import PretrainedConfig

    found, _ = PretrainedConfig.get_config_dict(model)
    return dict(found)


def _write(folder: Path, config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return folder


def _drafts(tree: dict[str, Any] | None, speculative: Any) -> dict[str, Any]:
    """VLLM's ``speculative_config``, for trees of few nodes as their section then says."""
    drafts = {"method": speculative.method, "num_speculative_tokens": _DEPTH}
    for name in ("prompt_lookup_min", "prompt_lookup_max"):
        if value := getattr(speculative, name, None):
            drafts[name] = value
    if tree is not None:
        steps = min(int(tree.get("steps", _DEPTH)), _DEPTH)
        topk = min(int(tree.get("topk", _TOPK)), _TOPK)
        tree |= {"topk": topk, "steps": steps, "nodes": _NODES if topk > 1 else None}
        if tree.get("hot_tokens") is not None:
            tree["hot_tokens"] = topk
        drafts["num_speculative_tokens"] = steps
    return drafts


def _transfer(
    vllm_config: Any, tiny: TinyConfig, dtype: str, folder: Path, wanted: dict[str, str]
) -> dict[str, Any]:
    """Our first connector as the flags have it, with little memory, and storage in the folder."""
    transfer, prefix = vllm_config.kv_transfer_config, "vllm:graft_hicache_"
    (_, first), *_ = extra_configs(transfer)
    given = without_nonce(first)  # type: ignore[arg-type]
    given |= {"host_bytes": _HOST_TOKENS * _token_bytes(tiny, dtype), "weights": "proof"}
    wanted[f"{prefix}hit_tokens_host"] = "tokens from the host cache"
    wanted[f"{prefix}evictions"] = "evictions from it"
    if given.get("load", "auto") in ("auto", "recompute"):
        # Nothing is as fast as computing a tiny model's K/V again.
        given["load"] = "async"
    if given.get("storage"):
        given["storage"] = {**given["storage"], "path": str(folder / "storage")}
        given["prefetch"] = {"policy": "wait_complete"}
        wanted[f"{prefix}hit_tokens_storage"] = "tokens from storage"
    return {
        "kv_connector": CONNECTOR,
        "kv_role": transfer.kv_role,
        "kv_connector_extra_config": given,
    }


def _token_bytes(tiny: TinyConfig, dtype: str) -> int:
    """Bytes of a token's K/V in all plain layers, of which a draft has one or two."""
    config = text_of(tiny.target())
    latent = config.get("kv_lora_rank", 0) + config.get("qk_rope_head_dim", 0)
    plain = 2 * config.get("num_key_value_heads", 1) * config.get("head_dim", 0)
    layers = config["num_hidden_layers"] + 2
    return int((latent or plain) * layers * (4 if dtype == "float32" else 2))
