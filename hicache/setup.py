"""Builds the scheduler's side with what the configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_graft.errors import HookError
from vllm_graft.hicache.config import HiCacheConfig, flag
from vllm_graft.hicache.eviction import EvictionPolicy
from vllm_graft.hicache.geometry import Geometry
from vllm_graft.hicache.host_index import HostIndex
from vllm_graft.hicache.scheduler import HiCacheScheduler
from vllm_graft.manager import manager

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def make_scheduler(
    config: HiCacheConfig, geometry: Geometry, vllm_config: VllmConfig
) -> HiCacheScheduler:
    """The scheduler's side of an engine.

    Raises:
        HookError: for a name that nobody provides, or an entry of the wrong type.
    """
    index = HostIndex(
        geometry.shape.num_slots,
        make_policy(config.eviction, geometry.shape.num_slots),
        {group.index: group.page_bytes for group in geometry.groups},
    )
    speculative = vllm_config.speculative_config is not None
    return HiCacheScheduler(config, geometry, index, speculative)


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """The eviction policy of a name.

    Raises:
        HookError: if nobody provides it, or it is no ``EvictionPolicy``.
    """
    offer = manager().choose("graft_eviction_policies", name, flag("eviction"))
    policy = offer.entry.resolve()(capacity)
    if not isinstance(policy, EvictionPolicy):
        raise HookError(
            f"{flag('eviction')}={name}: {type(policy).__name__} of {offer.provider} is not a "
            "vllm_graft.hicache.eviction.EvictionPolicy"
        )
    return policy
