"""Checks of the host KV cache's configuration in the frontend, before a model loads. vLLM builds
its configuration several times, so each check may run several times, even while the engine serves.
It leaves nothing behind."""

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from vllm_graft.base.errors import ConfigError, GraftError, HookError
from vllm_graft.base.options import target_of
from vllm_graft.base.refusal import Find, Found, Refusals
from vllm_graft.base.values import human, reason_of
from vllm_graft.hicache.config.cache_config import (
    HiCacheConfig,
    extra_configs,
    flag,
    refuse_misspelt,
)
from vllm_graft.hicache.config.connector_options import flags_below
from vllm_graft.hicache.host import region
from vllm_graft.hicache.host.machine_memory import filesystem_bytes, machine_bytes
from vllm_graft.hicache.host.region import SHM
from vllm_graft.hicache.pages.host_form import PACKED
from vllm_graft.hicache.pages.pool_shape import least_page_bytes
from vllm_graft.hicache.storage.backend import StorageBackend
from vllm_graft.hooks import manager

Rule = Callable[[HiCacheConfig, Any], Iterable[Found]]
Asked = list[tuple[str, HiCacheConfig]]
"""The full flag and the configuration of each connector."""

REFUSALS = Refusals()


def parse_connectors(vllm_config: Any) -> Asked:
    """The configuration of each of our connectors, including those below a ``MultiConnector``."""
    refuse_misspelt(vllm_config.kv_transfer_config)
    found = []
    for path, values in extra_configs(vllm_config.kv_transfer_config):
        with flags_below(path):
            found.append((path, HiCacheConfig.parse(values)))
    return found


def check_names(asked: Asked) -> None:
    """Raise ConfigError for a policy that nobody provides."""
    for path, config in asked:
        with flags_below(path):
            manager.manager().choose("graft_eviction_policies", config.eviction, flag("eviction"))


def storage_offer(storage: Mapping[str, Any]) -> tuple[manager.Offer, dict[str, Any]]:
    """The backend that the option ``storage`` names, and that backend's options."""
    options = dict(storage)
    name = options.pop("backend")
    offer = manager.manager().choose("graft_storage_backends", name, flag("storage", "backend"))
    return offer, options


def _of_each(rule: Rule) -> Find:
    def find(asked: Asked, vllm_config: Any) -> Iterator[Found]:
        for path, config in asked:
            with flags_below(path):
                found = list(rule(config, vllm_config))
            yield from found

    return find


@REFUSALS.row(
    "sleep mode",
    "The KV cache's memory is given up while copies know it by its addresses.",
    "drop `--enable-sleep-mode`",
)
def _sleep_mode(asked: Asked, vllm_config: Any) -> Iterator[str]:
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        yield "--enable-sleep-mode is given"


@REFUSALS.row(
    "a store that another server has open with pages of the same model",
    "One engine at a time opens a store.",
    "give each engine its own path",
)
@_of_each
def _open_store(config: HiCacheConfig, vllm_config: Any) -> Iterator[Found]:
    """Find servers of other process groups, as this server may have opened the store already. The
    first half of the namespace is known here, which identifies the model. With data parallelism it
    is unknown which replica this is, so nothing is checked. In all cases that are not decided here,
    opening the store will fail if another process has it open."""
    from vllm_graft.hicache.pages.namespace import NAMESPACE_START, Engine, namespace_start

    held = _held(config, vllm_config)
    if not held or vllm_config.parallel_config.data_parallel_size > 1:
        return
    try:
        start = namespace_start(Engine(vllm_config, config.weights, config.page_options))
    except ConfigError:
        return  # The weights may not be on the disk yet.
    for space, pid in held.items():
        if space[:NAMESPACE_START] == start and _is_foreign(pid):
            yield Found(
                f"{flag('storage', 'path')}: process {pid} has {space.hex()} in "
                f"{str((config.storage or {}).get('path'))!r} open, with pages of this model"
            )


def _held(config: HiCacheConfig, vllm_config: Any) -> dict[bytes, int]:
    if config.storage is None or not _is_here(vllm_config.parallel_config):
        return {}
    offer, options = storage_offer(config.storage)
    try:
        backend = offer.entry.resolve()
    except HookError as error:
        raise ConfigError(f"{flag('storage', 'backend')}: {error}") from error
    # An entry may resolve to a function that makes a store. Such stores have no checks.
    if not (isinstance(backend, type) and issubclass(backend, StorageBackend)):
        return {}
    try:
        backend.check(options)
        if problem := backend.too_small(options, _least_part_bytes(config, vllm_config)):
            raise ConfigError(problem)
        return {bytes(space): int(pid) for space, pid in backend.open_elsewhere(options).items()}
    except (GraftError, KeyboardInterrupt):
        raise
    except BaseException as error:  # A third party's check may raise anything.
        raise ConfigError(
            f"{flag('storage')}: the backend {offer.entry.name!r} of {offer.provider} failed to "
            f"check its options: {reason_of(error)}"
        ) from error


def _least_part_bytes(config: HiCacheConfig, vllm_config: Any) -> int:
    """The least bytes of one rank's part of a page, which is what a store keeps; 0 if unknown."""
    whole = least_page_bytes(vllm_config, config.host_dtype)
    return whole // max(1, int(vllm_config.parallel_config.world_size))


def _is_foreign(pid: int) -> bool:
    try:
        return os.getpgid(pid) != os.getpgid(0)
    except OSError:
        return False


@REFUSALS.row(
    "`host_bytes` that no page fits into",
    "The cache holds whole pages.",
    "give `host_bytes` of thousands of pages",
)
@_of_each
def _too_small(config: HiCacheConfig, vllm_config: Any) -> Iterator[Found]:
    least = max(mmap.PAGESIZE, least_page_bytes(vllm_config, config.host_dtype))
    if (wanted := int(config.host_bytes)) < least:
        yield Found(
            f"{flag('host_bytes')} is {wanted}, but a page of KV takes {least} bytes or more"
        )


@REFUSALS.row(
    f"`host_bytes` that leaves the machine no memory for vLLM itself, or of more than {SHM} has",
    "The memory is taken when the engine starts.",
    "lower `host_bytes`",
)
@_of_each
def _too_large(config: HiCacheConfig, vllm_config: Any) -> Iterator[Found]:
    from vllm.platforms import current_platform

    parallel, key = vllm_config.parallel_config, flag("host_bytes")
    if not _is_here(parallel) or getattr(current_platform, "is_planned", False):
        return
    engines, wanted = parallel.data_parallel_size_local, config.host_bytes
    if config.shared:  # Engines take it once.
        engines = 1
    each = f" for each of {engines} data-parallel engines" if engines > 1 else ""
    head = f"{key} is {human(wanted)}{each}, but"
    machine = machine_bytes()
    # As far as that is a tenth of all.
    ranks = parallel.data_parallel_size_local * parallel.world_size
    needed = min((1 + ranks) * PROCESS_BYTES, machine // 10)
    if wanted * engines > machine - needed:
        # Rounded down, so that the advice is not refused.
        tenths = 10 * (machine - needed) // engines >> 30
        yield Found(
            f"{head} this machine (or container) has {human(machine)} of "
            f"memory, of which vLLM's own processes need {human(needed)}",
            f"lower {key} to {tenths / 10:g}GiB or less",
        )
        return
    shares = parallel.world_size > 1 or config.storage is not None or config.shared
    shared = filesystem_bytes(SHM) if shares else None
    if shared is not None and wanted * engines > shared:
        yield Found(
            f"{head} {SHM} has {human(shared)}",
            f"raise its size (docker --shm-size), or lower {key}",
        )


@REFUSALS.row(
    "`shared` with other `host_bytes` than the servers that share host memory already",
    "It is one region.",
    "give the same `host_bytes`, or end those servers first",
)
@_of_each
def _shared_size(config: HiCacheConfig, vllm_config: Any) -> Iterator[Found]:
    from vllm_graft.hicache.pages.geometry import pool_prefix

    if not config.shared or not _is_here(vllm_config.parallel_config):
        return
    for other in region.pools(pool_prefix(config, vllm_config)):
        if other != (wanted := int(config.host_bytes)):
            yield Found(
                f"{flag('host_bytes')} is {wanted}, but servers that share host memory for this "
                f"model have {other}",
                f"give {flag('host_bytes')}={other}, or end them first",
            )


@REFUSALS.row(
    "`shared` with an `eviction` other than `lru`",
    "Servers that share memory keep one order of pages.",
    "set `shared` to false",
)
@_of_each
def _shared_order(config: HiCacheConfig, vllm_config: Any) -> Iterator[Found]:
    if config.shared and config.eviction != "lru":
        key = flag("eviction")
        yield Found(f"{key} is {config.eviction}, and shared memory has lru", f"drop {key}")


@REFUSALS.row(
    "`shared` with weights that a trainer sends",
    "Pages of weights that change are found by their own server alone.",
    "set `shared` to false",
)
@_of_each
def _shared_alone(config: HiCacheConfig, vllm_config: Any) -> Iterator[Found]:
    if config.shared and getattr(vllm_config, "weight_transfer_config", None) is not None:
        yield Found("--weight-transfer-config is given", f"drop {flag('shared')}")


PROCESS_BYTES = 2 << 30
"""Memory that is left to each process of vLLM for its libraries, its CUDA context and buffers."""


def _is_here(parallel: Any) -> bool:
    """Whether engines run on this machine. Ray's may not, and some frontends have no engines."""
    return bool(parallel.data_parallel_size_local) and parallel.data_parallel_backend != "ray"


_ONE = (
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
    "nnodes",
)
"""Attributes of vLLM's ``ParallelConfig``, whose flags have the same names."""


@REFUSALS.row(
    "pipeline and context parallelism, several machines",
    "Ranks share one region of host memory, in which each has the same slots.",
    "use tensor and data parallelism",
)
def _parallelism(asked: Asked, vllm_config: Any) -> Iterator[Found]:
    for name in _ONE:
        if (value := getattr(vllm_config.parallel_config, name, 1)) > 1:
            key = f"--{name.replace('_', '-')}"
            yield Found(f"{key} is {value}", f"set {key} to 1")


@REFUSALS.row(
    "`--distributed-executor-backend external_launcher` with several ranks",
    "Each rank has a scheduler of its own, which hears of no other rank.",
    "set `--distributed-executor-backend` to mp or ray",
)
def _launcher(asked: Asked, vllm_config: Any) -> Iterator[str]:
    parallel = vllm_config.parallel_config
    backend = getattr(parallel, "distributed_executor_backend", None)
    if backend == "external_launcher" and parallel.world_size > 1:
        yield "--distributed-executor-backend is external_launcher"


@REFUSALS.row(
    "`host_dtype: fp8` for K/V that is not in 16 or 32 bits, or `packed` if it is not bfloat16",
    "Other K/V is not converted.",
    "drop `host_dtype`",
)
@_of_each
def _host_dtype(config: HiCacheConfig, vllm_config: Any) -> Iterator[Found]:
    if config.host_dtype is None:
        return
    model, cache_dtype = target_of(vllm_config), str(vllm_config.cache_config.cache_dtype)
    packed, reason = config.host_dtype == PACKED.name, ""
    if cache_dtype == "auto" and model is not None:
        cache_dtype = str(model.dtype).removeprefix("torch.")
    if cache_dtype.startswith("fp8"):
        reason = f"the device's K/V is {cache_dtype} already (--kv-cache-dtype)"
    elif packed and cache_dtype not in ("auto", "bfloat16"):
        reason = f"the device's K/V is {cache_dtype} (--kv-cache-dtype, --dtype)"
    elif not packed and model is not None and model.use_mla:
        reason = "the model uses MLA attention"
    elif model is not None and model.is_hybrid:
        reason = "the model has recurrent states"
    elif model is not None and hasattr(model.hf_text_config, "index_topk"):
        reason = "the model has an indexer"
    if reason:
        key = flag("host_dtype")
        yield Found(f"{key} is {config.host_dtype}, but {reason}", f"drop {key}")
