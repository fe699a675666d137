"""Builds the scheduler's side with what the configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_graft.errors import ConfigError, HookError
from vllm_graft.hicache import region
from vllm_graft.hicache.config import HiCacheConfig, flag
from vllm_graft.hicache.eviction import EvictionPolicy
from vllm_graft.hicache.faults import FaultInjector, FaultOptions, inject
from vllm_graft.hicache.geometry import Geometry
from vllm_graft.hicache.host_index import HostIndex
from vllm_graft.hicache.host_pool import HostPool
from vllm_graft.hicache.namespace import namespace
from vllm_graft.hicache.options import parse
from vllm_graft.hicache.scheduler import HiCacheScheduler
from vllm_graft.hicache.storage import StorageBackend
from vllm_graft.hicache.tier import StorageTier
from vllm_graft.manager import manager

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def make_scheduler(
    config: HiCacheConfig,
    geometry: Geometry,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
) -> HiCacheScheduler:
    """The scheduler's side of an engine.

    Raises:
        HookError: for an entry of the wrong type.
        ConfigError: for a name that nobody provides, or what it refuses.
    """
    try:
        return _make_scheduler(config, geometry, vllm_config, kv_cache_config)
    finally:
        # The ranks have mapped the region by now: vLLM registers KV caches with them first.
        if geometry.shared_name is not None:
            region.remove(geometry.shared_name)


def _make_scheduler(
    config: HiCacheConfig,
    geometry: Geometry,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
) -> HiCacheScheduler:
    index = HostIndex(
        geometry.shape.num_slots,
        make_policy(config.eviction, geometry.shape.num_slots),
        {group.index: group.page_bytes for group in geometry.groups},
    )
    speculative = vllm_config.speculative_config is not None
    tier = None
    if config.storage is not None:
        backend = make_backend(config, namespace_of(config, geometry, vllm_config, kv_cache_config))
        pool = HostPool(geometry.shape, geometry.shared_name)
        tier = StorageTier(backend, pool, index, geometry, config.prefetch)
    return HiCacheScheduler(config, geometry, index, speculative, tier)


def namespace_of(
    config: HiCacheConfig,
    geometry: Geometry,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
) -> bytes:
    """What all that gives a page its meaning comes to, the order of its bytes included."""
    pools = {str(g.index): [g.page_bytes, *g.layers] for g in geometry.groups}
    extra: dict[str, object] = {"pools": pools, "shards": geometry.shape.num_shards}
    if config.host_dtype is not None:
        extra["host_dtype"] = config.host_dtype
    return namespace(
        vllm_config,
        kv_cache_config,
        weights=config.weights,
        asked=config.page_options,
        extra=extra,
    )


def require_storage_room(config: HiCacheConfig, geometry: Geometry) -> None:
    """Refuse storage in which no page fits: each process asks, before it takes host memory.

    Raises:
        HookError: if nobody provides the backend.
        ConfigError: for options that it refuses.
    """
    if config.storage is None:
        return
    options = dict(config.storage)
    name = options.pop("backend")
    offer = manager().choose("graft_storage_backends", name, flag("storage", "backend"))
    backend = offer.entry.resolve()
    # Others are made by a function: what these refuse shows when they are opened.
    if isinstance(backend, type) and issubclass(backend, StorageBackend):
        largest = max(group.page_bytes for group in geometry.groups)
        if problem := backend.too_small(options, largest):
            raise ConfigError(problem)


def make_backend(config: HiCacheConfig, space: bytes) -> StorageBackend:
    """The storage backend of the configuration, with its faults if it asks for any.

    Raises:
        HookError: if it is no ``StorageBackend``.
        ConfigError: if nobody provides it, or for options that it refuses.
    """
    options = dict(config.storage or {})
    name = options.pop("backend")
    offer = manager().choose("graft_storage_backends", name, flag("storage", "backend"))
    backend = offer.entry.resolve()(space, options)
    if not isinstance(backend, StorageBackend):
        raise HookError(
            f"{flag('storage', 'backend')}={name}: {type(backend).__name__} of {offer.provider} "
            "is not a vllm_graft.hicache.storage.StorageBackend"
        )
    injector = make_injector(config)
    return backend if injector is None else inject(backend, injector)


def make_injector(config: HiCacheConfig) -> FaultInjector | None:
    """The fault injector, if the configuration asks for one."""
    if config.faults is None:
        return None
    return FaultInjector(parse(FaultOptions, config.faults, "faults"))


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """The eviction policy of a name.

    Raises:
        HookError: if it is no ``EvictionPolicy``.
        ConfigError: if nobody provides it.
    """
    offer = manager().choose("graft_eviction_policies", name, flag("eviction"))
    policy = offer.entry.resolve()(capacity)
    if not isinstance(policy, EvictionPolicy):
        raise HookError(
            f"{flag('eviction')}={name}: {type(policy).__name__} of {offer.provider} is not a "
            "vllm_graft.hicache.eviction.EvictionPolicy"
        )
    return policy
