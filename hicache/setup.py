"""Builds the scheduler's side with the store and the policy that the configuration names."""

from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_graft.base.errors import ConfigError, GraftError, HookError
from vllm_graft.base.log import warning_once
from vllm_graft.hicache.cache_refusals import storage_offer
from vllm_graft.hicache.config.cache_config import HiCacheConfig, flag
from vllm_graft.hicache.host import region
from vllm_graft.hicache.host.eviction import EvictionPolicy
from vllm_graft.hicache.host.index import HostIndex
from vllm_graft.hicache.host.pool import HostPool
from vllm_graft.hicache.host.shared_index import SharedIndex
from vllm_graft.hicache.pages import engine_core
from vllm_graft.hicache.pages.geometry import Geometry
from vllm_graft.hicache.pages.namespace import Engine, namespace
from vllm_graft.hicache.planning.scheduler import HiCacheScheduler
from vllm_graft.hicache.storage.backend import StorageBackend
from vllm_graft.hicache.storage.tier.storage_tier import StorageTier
from vllm_graft.hooks.manager import manager


def make_scheduler(
    config: HiCacheConfig,
    geometry: Geometry,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
) -> HiCacheScheduler:
    """Build the scheduler's side of an engine. Raises `HookError` if an entry has the wrong type,
    and `ConfigError` if no plugin provides a named entry, or the entry refuses its options."""
    try:
        slots = geometry.shape.num_slots
        page_bytes = {group.index: group.page_bytes for group in geometry.groups}
        speculative = vllm_config.speculative_config is not None
        core = engine_core.core_of(vllm_config.model_config.model)
        if config.shared or config.storage is not None:
            engine = engine_of(config, geometry, vllm_config, kv_cache_config, core)
            pool = HostPool(geometry.shape, geometry.shared_name, sharing=geometry.sharing)
        if config.shared and core is not None and not (pool.shared and pool.shared.accompanied):
            raise GraftError(
                f"{flag('shared')}: the ranks have mapped another region than the scheduler's "
                f"{pool.name}, so they disagree about the model. Please report this with its name."
            )
        index = (
            SharedIndex(pool, namespace(replace(engine, common=True)), page_bytes)
            if config.shared
            else HostIndex(slots, make_policy(config.eviction, slots), page_bytes)
        )
        tier = None
        if config.storage is not None:
            backend = make_backend(config, namespace(engine))
            tier = StorageTier(backend, pool, index, geometry, config.prefetch)
        scheduler = HiCacheScheduler(config, geometry, index, speculative, tier)
        if core is not None:
            engine_core.listen(core, scheduler)
        return scheduler
    finally:
        # All ranks have mapped the region by now, because vLLM registers KV caches before.
        if geometry.shared_name is not None and geometry.sharing is None:
            region.remove(geometry.shared_name)


def engine_of(
    config: HiCacheConfig,
    geometry: Geometry,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    core: Any,
) -> Engine:
    """The inputs of an engine's K/V. The ranks of ``core`` are asked what they run. The pages of a
    scheduler that no engine core has built are shared with nobody."""
    if core is None:
        warning_once(
            "host KV cache: no engine core of this process has loaded the model, so it is unknown "
            "what its ranks run; its pages in storage are read by no other engine."
        )
    pools = {str(g.index): [g.page_bytes, *g.layers] for g in geometry.groups}
    return Engine(
        vllm_config,
        config.weights,
        config.page_options,
        kv_cache_config,
        None if core is None else engine_core.ask_attention(core),
        {"pools": pools, "shards": geometry.shape.num_shards},
    )


def require_storage_room(config: HiCacheConfig, geometry: Geometry) -> None:
    """Refuse storage in which no page fits. Each process calls it before it takes host memory."""
    if config.storage is None:
        return
    offer, options = storage_offer(config.storage)
    backend = offer.entry.resolve()
    # Other entries are functions. What these refuse is seen when the store is opened.
    if isinstance(backend, type) and issubclass(backend, StorageBackend):
        largest = max(group.page_bytes for group in geometry.groups)
        if problem := backend.too_small(options, largest):
            raise ConfigError(problem)


def make_backend(config: HiCacheConfig, space: bytes) -> StorageBackend:
    """Open the configured storage backend."""
    offer, options = storage_offer(config.storage or {})
    backend = offer.entry.resolve()(space, options)
    if not isinstance(backend, StorageBackend):
        raise HookError(
            f"{flag('storage', 'backend')}={offer.entry.name}: {type(backend).__name__} of "
            f"{offer.provider} is not a vllm_graft.hicache.storage.backend.StorageBackend"
        )
    return backend


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """Make the eviction policy with a name."""
    offer = manager().choose("graft_eviction_policies", name, flag("eviction"))
    policy = offer.entry.resolve()(capacity)
    if not isinstance(policy, EvictionPolicy):
        raise HookError(
            f"{flag('eviction')}={name}: {type(policy).__name__} of {offer.provider} is not a "
            "vllm_graft.hicache.host.eviction.EvictionPolicy"
        )
    return policy
