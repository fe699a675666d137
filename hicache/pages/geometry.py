"""Sizes that the scheduler and every rank derive independently from vLLM's configuration."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_graft.base.errors import ConfigError
from vllm_graft.hicache.config.cache_config import HiCacheConfig, flag
from vllm_graft.hicache.config.connector_options import CONNECTOR
from vllm_graft.hicache.config.nonce import REGION_PREFIX, nonce_of
from vllm_graft.hicache.pages.groups import Group, HitPolicy
from vllm_graft.hicache.pages.host_form import FORMS, FP8, PACKED, HostForm
from vllm_graft.hicache.pages.layout import layer_order
from vllm_graft.hicache.pages.pool_shape import PoolShape, Sharing

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SHARED_FORMAT = 2
"""Version of how engines use a region that they share; others get another region."""

_PLAIN = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)

_SERVED = {
    FP8: (
        _PLAIN,
        (torch.bfloat16, torch.float16, torch.float32),
        "K/V of full, sliding-window and chunked attention in bfloat16, float16 or float32",
    ),
    PACKED: ((*_PLAIN, MLAAttentionSpec), (torch.bfloat16,), "K/V and MLA's latents in bfloat16"),
}
"""Kinds of K/V that a form can keep, their types on the device, and both in words."""


@dataclass(frozen=True)
class Geometry:
    """Sizes and roles on which all processes of an engine agree.

    Attributes:
        shared_name: name of the shared region's file, unique to this engine unless it is one of
            ``sharing``. Rank 0 creates the file. None if one process uses the memory alone.
        replicas: number of consecutive ranks that hold the same KV, as all do with MLA. They share
            a shard, of which each writes a part.
        zeroes_blocks: whether vLLM zeroes blocks that it reuses.
        handed_off: pools whose pages vLLM hands over one by one (recurrent states).
        form: form of K/V on the host; None if it is the device's.
        convert_from: dtype of the device's K/V if there is a form.
        sharing: set if other engines use the same region.
        fails_blocks: whether vLLM can end just the requests that have read invalid blocks. With
            several groups it cannot tell which request a block belongs to. Nor can it recompute:
            Model Runner V2 does not set back the positions of a running request on the device.
    """

    groups: tuple[Group, ...]
    shape: PoolShape
    shared_name: str | None
    num_workers: int
    replicas: int
    zeroes_blocks: bool
    handed_off: frozenset[int]
    fails_blocks: bool = False
    form: HostForm | None = None
    convert_from: torch.dtype | None = None
    sharing: Sharing | None = None

    def shard_of(self, rank: int) -> int:
        """The shard that a rank reads. It and its replicas write it."""
        return rank // self.replicas

    def memory_of(self, rank: int) -> range:
        """The bytes of the region that a rank allocates: its part of its shard."""
        return self.shape.part(self.shard_of(rank), rank % self.replicas, self.replicas)

    @classmethod
    def of(
        cls, config: HiCacheConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> Geometry:
        """Derive the geometry from an engine's configuration; a ConfigError for other models."""
        parallel = vllm_config.parallel_config
        groups = cached_groups(kv_cache_config)
        form, convert_from = None, None
        if config.host_dtype is not None:
            form = FORMS[config.host_dtype]
            convert_from = _only_dtype(form, groups, kv_cache_config)
            groups = tuple(
                replace(g, page_bytes=form.num_bytes(g.page_bytes // convert_from.itemsize))
                for g in groups
            )
        replicas = max(1, kv_cache_config.kv_tp_replicas)
        shards = parallel.world_size // replicas
        largest = max(group.page_bytes for group in groups)
        alone = parallel.world_size == 1 and config.storage is None
        transfer: Any = vllm_config.kv_transfer_config
        specs = kv_cache_config.kv_cache_groups
        handed_off = {
            g.index for g in groups if isinstance(specs[g.index].kv_cache_spec, MambaSpec)
        }
        shape = PoolShape.fit(int(config.host_bytes), largest, shards)
        name, sharing = None, None
        if config.shared:
            sharing = Sharing(_engine_id(transfer, parallel), int(config.host_bytes))
            name = pool_prefix(config, vllm_config) + digest_of(shape.slot_bytes, shards)
        elif not alone:
            name = REGION_PREFIX + _engine_id(transfer, parallel).hex()
        return cls(
            groups=groups, shape=shape, shared_name=name, num_workers=parallel.world_size,
            replicas=replicas, zeroes_blocks=kv_cache_config.needs_kv_cache_zeroing,
            handed_off=frozenset(handed_off),
            fails_blocks=len(specs) == 1 and transfer.kv_load_failure_policy == "fail",
            form=form, convert_from=convert_from, sharing=sharing,
        )  # fmt: skip


def pool_prefix(config: HiCacheConfig, vllm_config: VllmConfig) -> str:
    """The first part of the name of a region that engines share; the model need not be loaded. It
    only keeps apart what had little use for each other's slots, by what no process changes while
    it loads a model. Records of pages have the whole namespace."""
    model: Any = vllm_config.model_config
    named = [getattr(model, name, None) for name in ("model", "revision", "dtype")]
    ranks = vllm_config.parallel_config.tensor_parallel_size
    return REGION_PREFIX + digest_of(*named, ranks, config.page_options)


def digest_of(*parts: Any) -> str:
    """16 hexadecimal digits of values, this user, and the form of shared regions."""
    text = repr([SHARED_FORMAT, os.geteuid(), vllm.__version__, *parts])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _engine_id(transfer: Any, parallel: Any) -> bytes:
    """The id of an engine, 16 bytes, which only its processes can derive."""
    nonce = nonce_of(transfer.kv_connector_extra_config)
    if nonce is None:
        raise ConfigError(
            f"{CONNECTOR}: host memory is shared by the ranks and the scheduler, but the "
            "configuration of this engine was made without vllm-graft, or changed afterwards: run "
            "`vllm-graft doctor`, and see that VLLM_PLUGINS, if it is set, has 'graft'."
        )
    # Data-parallel engines share one nonce; vLLM gives each its own id, which may be any text.
    engine = f"{nonce} {transfer.engine_id} {parallel.data_parallel_index}"
    return hashlib.blake2b(engine.encode(), digest_size=16).digest()


def cached_groups(kv_cache_config: KVCacheConfig) -> tuple[Group, ...]:
    """The groups whose pages make up a cached prefix; a ConfigError if one cannot be cached."""
    specs = kv_cache_config.kv_cache_groups
    indices = kv_cache_config.prefix_cacheable_group_ids
    if not indices:
        raise ConfigError(f"{CONNECTOR}: this model has no KV cache that a prefix could reuse.")
    unit = kv_cache_config.hash_block_size or math.gcd(
        *(specs[index].kv_cache_spec.block_size for index in indices)
    )
    return tuple(_group(index, specs[index], unit) for index in indices)


def _group(index: int, group: KVCacheGroupSpec, unit: int) -> Group:
    spec = group.kv_cache_spec
    layers = tuple(sorted(group.layer_names, key=layer_order))
    by_layer: dict[str, Any] = {}
    if isinstance(spec, UniformTypeKVCacheSpecs):
        by_layer = spec.kv_cache_specs
    policy, window = _hit_policy(next(iter(by_layer.values()), spec))
    return Group(
        index=index,
        block_tokens=spec.block_size,
        hashes_per_block=max(1, spec.block_size // unit),
        hit_policy=policy,
        window=window,
        page_bytes=sum(_page_bytes(by_layer.get(name, spec)) for name in layers),
        layers=layers,
    )


def _only_dtype(
    form: HostForm, groups: Sequence[Group], kv_cache_config: KVCacheConfig
) -> torch.dtype:
    kinds, dtypes, words = _SERVED[form]
    key, found = f"{flag('host_dtype')}={form.name}", set[torch.dtype]()
    for group in groups:
        whole: Any = kv_cache_config.kv_cache_groups[group.index].kv_cache_spec
        by_layer = getattr(whole, "kv_cache_specs", {})
        for spec in (by_layer.get(name, whole) for name in group.layers):
            dtype, mode = getattr(spec, "dtype", None), getattr(spec, "kv_quant_mode", 0)
            # The exact type counts: a subclass may keep scales, latents or hidden states.
            if type(spec) not in kinds or dtype not in dtypes or mode:
                raise ConfigError(
                    f"{key}: pool {group.name} is a {type(spec).__name__} of {dtype}, but only "
                    f"{words} can be kept so: remove host_dtype."
                )
            found.add(dtype)
    if len(found) > 1:
        raise ConfigError(
            f"{key}: K/V has several types, {sorted(map(str, found))}: remove host_dtype."
        )
    return found.pop()


def _hit_policy(spec: Any) -> tuple[HitPolicy, int]:
    if isinstance(spec, SlidingWindowSpec):
        return HitPolicy.TRAILING_PAGES, spec.sliding_window + spec.extra_retained_tokens
    if isinstance(spec, ChunkedLocalAttentionSpec):
        # Chunked attention never looks back further than one chunk.
        return HitPolicy.TRAILING_PAGES, spec.attention_chunk_size
    if isinstance(spec, MambaSpec):
        if spec.mamba_cache_mode != "align":
            raise ConfigError(
                f"{CONNECTOR}: recurrent states are kept at block boundaries only with prefix "
                f"caching in mode 'align', but the mode is {spec.mamba_cache_mode!r}: give "
                "--enable-prefix-caching --mamba-cache-mode align."
            )
        return HitPolicy.LAST_PAGE, 0
    # RSWASpec is excluded because it drops blocks in the middle of a prefix.
    if isinstance(spec, FullAttentionSpec) and not isinstance(spec, RSWASpec):
        return HitPolicy.ALL_PAGES, 0
    raise ConfigError(f"{CONNECTOR} does not know a KV cache of kind {type(spec).__name__}.")


def _page_bytes(spec: Any) -> int:
    """Bytes of a layer's page, without padding."""
    if isinstance(spec, MambaSpec):
        return int(replace(spec, page_size_padded=None).page_size_bytes)
    if isinstance(spec, AttentionSpec):
        return int(spec.unpadded_page_size_bytes)
    return int(spec.page_size_bytes)
