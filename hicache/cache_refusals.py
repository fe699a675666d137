"""Checks of the host KV cache's configuration in the frontend, before a model loads.

vLLM builds its configuration several times: in the frontend, in the engine's process, and when it
derives one for a draft model. So each check may run several times, even while the engine serves. It
leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from typing import Any

from vllm_graft.base.errors import ConfigError, GraftError, HookError
from vllm_graft.base.options import target_of
from vllm_graft.base.refusal import Find, Refusal
from vllm_graft.base.values import reason_of
from vllm_graft.hicache.config.cache_config import HiCacheConfig, extra_configs, flag
from vllm_graft.hicache.config.connector_options import flags_below
from vllm_graft.hicache.faults.injector import asked_for
from vllm_graft.hicache.host.machine_memory import filesystem_bytes, machine_bytes
from vllm_graft.hicache.host.region import SHM
from vllm_graft.hicache.pages.page_estimate import least_page_bytes
from vllm_graft.hicache.storage.backend import StorageBackend
from vllm_graft.hooks import manager

Rule = Callable[[HiCacheConfig, Any], None]
Asked = list[tuple[str, HiCacheConfig]]
"""The full flag and the configuration of each connector."""


def parse_connectors(vllm_config: Any) -> Asked:
    """The configuration of each of our connectors, including those below a ``MultiConnector``.

    Raises:
        ConfigError: for wrong keys and values. It names their full flags.
    """
    found = []
    for path, values in extra_configs(vllm_config.kv_transfer_config):
        with flags_below(path):
            found.append((path, HiCacheConfig.parse(values)))
    return found


def _for_each(rule: Rule) -> Find:
    """Turn a rule for one connector, which raises, into a check of all connectors."""

    def find(asked: Asked, vllm_config: Any) -> tuple[str, ...]:
        for path, config in asked:
            with flags_below(path):
                rule(config, vllm_config)
        return ()

    return find


def _eviction(config: HiCacheConfig, vllm_config: Any) -> None:
    manager.manager().choose("graft_eviction_policies", config.eviction, flag("eviction"))


def _faults(config: HiCacheConfig, vllm_config: Any) -> None:
    asked_for()


def _storage(config: HiCacheConfig, vllm_config: Any) -> None:
    if config.storage is None or not _is_here(vllm_config.parallel_config):
        return
    options = dict(config.storage)
    name = options.pop("backend")
    offer = manager.manager().choose("graft_storage_backends", name, flag("storage", "backend"))
    try:
        backend = offer.entry.resolve()
    except HookError as error:
        raise ConfigError(f"{flag('storage', 'backend')}: {error}") from error
    # An entry may resolve to a function that makes a store. Such stores have no checks.
    if not (isinstance(backend, type) and issubclass(backend, StorageBackend)):
        return
    try:
        backend.check(options)
        if problem := backend.too_small(options, _least_part_bytes(config, vllm_config)):
            raise ConfigError(problem)
        held = {bytes(space): int(pid) for space, pid in backend.open_elsewhere(options).items()}
    except (GraftError, KeyboardInterrupt):
        raise
    except BaseException as error:  # A third party's check may raise anything.
        raise ConfigError(
            f"{flag('storage')}: the backend {name!r} of {offer.provider} failed to check its "
            f"options: {reason_of(error)}"
        ) from error
    if held:
        _refuse_held(held, config, vllm_config)


def _least_part_bytes(config: HiCacheConfig, vllm_config: Any) -> int:
    """The least bytes of one rank's part of a page, which is what a store keeps; 0 if unknown."""
    whole = least_page_bytes(vllm_config, config.host_dtype)
    return whole // max(1, int(vllm_config.parallel_config.world_size))


def _refuse_held(held: Mapping[bytes, int], config: HiCacheConfig, vllm_config: Any) -> None:
    """Refuse to start if another server has the pages of the same model open.

    The first half of the namespace is known here, which identifies the model. Processes of this
    server may have opened the store already; they are in its process group. With data parallelism
    it is unknown here which replica this is, so nothing is checked. In all cases that are not
    decided here, opening the store will fail if another process has it open.
    """
    from vllm_graft.hicache.pages.inputs import Engine
    from vllm_graft.hicache.pages.namespace import NAMESPACE_START, namespace_start

    if vllm_config.parallel_config.data_parallel_size > 1:
        return
    try:
        start = namespace_start(Engine(vllm_config, config.weights, config.page_options))
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
    """Whether a process is alive and belongs to another server."""
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
    """Whether engines run on this machine. Ray's may not, and some frontends have no engines."""
    return bool(parallel.data_parallel_size_local) and parallel.data_parallel_backend != "ray"


def _parallelism(config: HiCacheConfig, vllm_config: Any) -> None:
    from vllm_graft.hicache.pages.geometry import refuse_parallelism

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


def _sleep_mode(config: HiCacheConfig, vllm_config: Any) -> None:
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise ConfigError(
            f"{flag()}: --enable-sleep-mode gives the KV cache's memory up while copies know it by "
            "its addresses: drop one of the two."
        )


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "sleep mode",
        "The KV cache's memory is given up while copies know it by its addresses.",
        "drop `--enable-sleep-mode`",
        _for_each(_sleep_mode),
    ),
    Refusal(
        "an eviction policy that nobody provides",
        "There is nothing to run.",
        "`lru`, `arc`, or a plugin's",
        _for_each(_eviction),
    ),
    Refusal(
        "wrong keys of `VLLM_GRAFT_FAULTS`",
        "It would inject something else.",
        "the keys that the message names",
        _for_each(_faults),
    ),
    Refusal(
        "storage that can't be opened",
        "What is asked for and not active is an error.",
        "another path, or other options",
        _for_each(_storage),
    ),
    Refusal(
        "`host_bytes` that no page fits into, or more than the machine has",
        "The memory is taken when the engine starts.",
        "another size",
        _for_each(_host_bytes),
    ),
    Refusal(
        "pipeline and context parallelism, several machines",
        "Ranks share one region of host memory, in which each has the same slots.",
        "tensor and data parallelism",
        _for_each(_parallelism),
    ),
    Refusal(
        "`host_dtype: fp8` for K/V that is not in 16 or 32 bits",
        "Only K/V of plain attention is converted.",
        "no `host_dtype`",
        _for_each(_host_dtype),
    ),
)
