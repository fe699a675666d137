"""What of the host KV cache is refused in the frontend, before a model loads.

vLLM builds its configuration several times, in the frontend, in the engine's process and wherever
it derives one for a draft model: each check may run in any of them, also while the engine serves,
and leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from typing import Any

from vllm_graft.errors import ConfigError, GraftError, HookError
from vllm_graft.hicache.config import HiCacheConfig, extra_configs, flag
from vllm_graft.hicache.faults import FaultOptions
from vllm_graft.hicache.memory import filesystem_bytes, machine_bytes
from vllm_graft.hicache.options import flags_below, parse
from vllm_graft.hicache.page_estimate import least_page_bytes, target_of
from vllm_graft.hicache.region import SHM
from vllm_graft.hicache.storage import StorageBackend
from vllm_graft.manager import manager
from vllm_graft.values import reason_of

Rule = Callable[[HiCacheConfig, Any], None]


def parse_connectors(vllm_config: Any) -> list[HiCacheConfig]:
    """The configuration of each of our connectors, also of those below a ``MultiConnector``.

    Raises:
        ConfigError: for wrong keys and values; names the flag of the connector that has them.
    """
    return _each(vllm_config, ())


def validate_connectors(vllm_config: Any) -> list[HiCacheConfig]:
    """As :func:`parse_connectors`, and whatever else can be known before a model loads.

    Raises:
        ConfigError: likewise.
    """
    return _each(vllm_config, RULES)


def _each(vllm_config: Any, rules: tuple[Rule, ...]) -> list[HiCacheConfig]:
    configs = []
    for path, values in extra_configs(vllm_config.kv_transfer_config):
        with flags_below(path):
            config = HiCacheConfig.parse(values)
            for rule in rules:
                rule(config, vllm_config)
        configs.append(config)
    return configs


def _eviction(config: HiCacheConfig, vllm_config: Any) -> None:
    manager().choose("graft_eviction_policies", config.eviction, flag("eviction"))


def _faults(config: HiCacheConfig, vllm_config: Any) -> None:
    if config.faults is not None:
        parse(FaultOptions, config.faults, "faults")


def _storage(config: HiCacheConfig, vllm_config: Any) -> None:
    if config.storage is None or not _is_here(vllm_config.parallel_config):
        return
    options = dict(config.storage)
    name = options.pop("backend")
    offer = manager().choose("graft_storage_backends", name, flag("storage", "backend"))
    try:
        backend = offer.entry.resolve()
    except HookError as error:
        raise ConfigError(f"{flag('storage', 'backend')}: {error}") from error
    # A function that makes a store can't be asked.
    if not (isinstance(backend, type) and issubclass(backend, StorageBackend)):
        return
    try:
        backend.check(options)
        if problem := backend.too_small(options, _least_part_bytes(config, vllm_config)):
            raise ConfigError(problem)
        held = {bytes(space): int(pid) for space, pid in backend.open_elsewhere(options).items()}
    except (GraftError, KeyboardInterrupt):
        raise
    except BaseException as error:  # A third party's.
        raise ConfigError(
            f"{flag('storage')}: the backend {name!r} of {offer.provider} failed to check its "
            f"options: {reason_of(error)}"
        ) from error
    if held:
        _refuse_held(held, config, vllm_config)


def _least_part_bytes(config: HiCacheConfig, vllm_config: Any) -> int:
    """Bytes at least of a page's part on one rank, which is what a store keeps; 0 if unknown."""
    whole = least_page_bytes(vllm_config, config.host_dtype)
    return whole // max(1, int(vllm_config.parallel_config.world_size))


def _refuse_held(held: Mapping[bytes, int], config: HiCacheConfig, vllm_config: Any) -> None:
    """Refuse to start where another server has the pages of this very model open.

    What a namespace begins with is known here. Processes of this server, which may have opened
    the store by now, are in its process group. Of replicas of data parallelism nobody knows here
    which one it is. Where it can't be told, opening the store tells.
    """
    from vllm_graft.hicache.namespace import NAMESPACE_START, namespace_start

    if vllm_config.parallel_config.data_parallel_size > 1:
        return
    try:
        start = namespace_start(vllm_config, weights=config.weights, asked=config.page_options)
    except ConfigError:
        return  # The weights may not be on the disk yet.
    for space, pid in held.items():
        if space[:NAMESPACE_START] == start and _is_foreign(pid):
            raise ConfigError(
                f"{flag('storage', 'path')}: process {pid} has {space.hex()} in "
                f"{str((config.storage or {}).get('path'))!r} open, with pages of this model. "
                "Give each engine its own path."
            )


def _is_foreign(pid: int) -> bool:
    """Whether a process lives, and belongs to another server."""
    try:
        return os.getpgid(pid) != os.getpgid(0)
    except OSError:
        return False


def _host_bytes(config: HiCacheConfig, vllm_config: Any) -> None:
    wanted = int(config.host_bytes)
    least = max(mmap.PAGESIZE, least_page_bytes(vllm_config, config.host_dtype))
    if wanted < least:
        raise ConfigError(
            f"{flag('host_bytes')} is {wanted}, but a page of KV takes {least} bytes or more: "
            "give as much as fits thousands of pages."
        )
    parallel = vllm_config.parallel_config
    if not _is_here(parallel):
        return
    engines = parallel.data_parallel_size_local
    each = f" for each of {engines} data-parallel engines" if engines > 1 else ""
    if wanted * engines > (machine := machine_bytes()):
        raise ConfigError(
            f"{flag('host_bytes')} is {wanted}{each}, but this machine (or container) has "
            f"{machine} bytes of memory: lower it."
        )
    shares = parallel.world_size > 1 or config.storage is not None
    shared = filesystem_bytes(SHM) if shares else None
    if shared is not None and wanted * engines > shared:
        raise ConfigError(
            f"{flag('host_bytes')} is {wanted}{each}, but {SHM} has {shared} bytes: raise its "
            "size (docker --shm-size), or lower it."
        )


def _is_here(parallel: Any) -> bool:
    """Whether the engines are on this machine: not those of Ray, or of a frontend without any."""
    return bool(parallel.data_parallel_size_local) and parallel.data_parallel_backend != "ray"


def _parallelism(config: HiCacheConfig, vllm_config: Any) -> None:
    from vllm_graft.hicache.geometry import refuse_parallelism

    refuse_parallelism(vllm_config.parallel_config)


def _host_dtype(config: HiCacheConfig, vllm_config: Any) -> None:
    if config.host_dtype is None:
        return
    model, cache = target_of(vllm_config), vllm_config.cache_config
    reason = ""
    if str(cache.cache_dtype).startswith("fp8"):
        reason = f"the device's K/V is {cache.cache_dtype} already (--kv-cache-dtype)"
    elif model is not None and model.use_mla:
        reason = "the model uses MLA attention"
    elif model is not None and model.is_hybrid:
        reason = "the model has recurrent states"
    if reason:
        raise ConfigError(f"{flag('host_dtype')}={config.host_dtype}: {reason}: remove host_dtype.")


RULES: tuple[Rule, ...] = (_eviction, _faults, _storage, _host_bytes, _parallelism, _host_dtype)
