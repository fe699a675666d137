"""The worker of one rank: it executes the scheduler's operations, and reports them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from vllm_graft.base import info
from vllm_graft.base.errors import GraftError
from vllm_graft.base.log import info_once, logger
from vllm_graft.hicache.config.cache_config import flag
from vllm_graft.hicache.copies.copy_engine import (
    Convert,
    CopyEngine,
    MemoryCopyEngine,
    Pools,
    fp8_copy,
    raise_incomplete,
)
from vllm_graft.hicache.copies.cuda_driver import CudaDriver, CudaDriverError
from vllm_graft.hicache.copies.packed_pages import packed_copy, unfit
from vllm_graft.hicache.copies.strided import HostShard
from vllm_graft.hicache.host.pool import HostPool, node_of_gpu
from vllm_graft.hicache.messages.operation import (
    CacheOperation,
    Direction,
    merge_ops,
    share_of,
)
from vllm_graft.hicache.messages.step_metadata import HiCacheMetadata, HiCacheReport
from vllm_graft.hicache.pages.geometry import Geometry
from vllm_graft.hicache.pages.groups import HitPolicy
from vllm_graft.hicache.pages.host_form import FP8, PACKED, HostForm
from vllm_graft.hicache.pages.layout import LayerPages, group_layers, pages_bytes
from vllm_graft.seams.wrap import wrap

if TYPE_CHECKING:
    from vllm_graft.hicache.copies.row_copies import StagingRing

_FORM_WORDS: dict[HostForm | None, str] = {
    None: "",
    FP8: ", K/V kept as fp8 (e4m3), which is lossy",
    PACKED: ", K/V packed without loss",
}


class HiCacheWorker:
    """Executes operations on one rank. Loads may go through ``staging_bytes`` of device memory."""

    def __init__(
        self, geometry: Geometry, rank: int, num_blocks: int, staging_bytes: int = 0
    ) -> None:
        self._geometry = geometry
        self._has_states = any(group.hit_policy is HitPolicy.LAST_PAGE for group in geometry.groups)
        self._shard = geometry.shard_of(rank)
        self._rank = rank
        self._num_blocks = num_blocks
        self._staging_bytes = staging_bytes
        self._pool: HostPool | None = None
        self._engine: CopyEngine | None = None
        self._unhooked: frozenset[str] = frozenset()
        self._async_loads: dict[int, str] = {}
        self._invalid_blocks: set[int] = set()
        self._later_loads: list[CacheOperation] = []
        self._begun: HiCacheMetadata | None = None
        self._report = HiCacheReport()
        self._counters: Counter[str] = Counter()

    def register(self, caches: Mapping[str, torch.Tensor], hooked: Collection[str]) -> None:
        """Find the pages in vLLM's KV cache, and map the host memory.

        The tensors' first dimension counts blocks. ``hooked`` layers call :meth:`wait_layer`.

        Raises:
            GraftError: if the tensors do not fit the configuration, or there is not enough memory.
        """
        geometry = self._geometry
        pools: dict[int, tuple[LayerPages, ...]] = {}
        for group in geometry.groups:
            layers = group_layers(group.layers, caches, self._num_blocks, geometry.form)
            if (found := pages_bytes(layers)) > geometry.shape.slot_bytes:
                raise GraftError(
                    f"pool {group.name}: pages take {found} bytes, the slots have "
                    f"{geometry.shape.slot_bytes}. Please report this with the model's name."
                )
            pools[group.index] = layers
        _check_dtypes(geometry, caches)
        device = next(iter(caches.values())).device
        node = _numa_node(device) if device.type == "cuda" else None
        self._pool = HostPool(
            geometry.shape,
            geometry.shared_name,
            node,
            geometry.memory_of(self._rank),
            creates=self._rank == 0,
            sharing=geometry.sharing,
        )
        shard = HostShard.of(self._pool, self._shard)
        self._unhooked = frozenset(
            layer.name for layers in pools.values() for layer in layers if layer.name not in hooked
        )
        if device.type == "cuda":
            self._pool.pin(self._shard)
            self._engine = self._stream_engine(pools, shard)
        else:
            options = _conversion(geometry, fp8_copy, packed_copy)
            self._engine = MemoryCopyEngine(pools, shard, **options)
        info.publish("hicache", info.weakly(self.counters))
        info_once(
            f"host KV cache: {geometry.shape.num_slots} pages of {geometry.shape.slot_bytes} "
            f"bytes, {len(pools)} pool(s), {type(self._engine).__name__}"
            + (f", once for each {geometry.replicas} ranks" if geometry.replicas > 1 else "")
            + _FORM_WORDS[geometry.form]
        )

    def _stream_engine(self, pools: Pools, shard: HostShard) -> CopyEngine:
        from vllm_graft.hicache.copies import fp8_kernel, packed_kernel, page_kernel
        from vllm_graft.hicache.copies.streams import StreamCopyEngine

        form, dtype = self._geometry.form, self._geometry.convert_from
        if form is None or dtype is None:
            page_kernel.warm_up()
        elif form is FP8:
            fp8_kernel.warm_up(dtype)
        else:
            packed_kernel.warm_up()
        strided = _strided_driver() if form is None else None
        return StreamCopyEngine(
            pools,
            shard,
            **_conversion(self._geometry, fp8_kernel.convert_runs, packed_kernel.convert_runs),
            strided=strided,
            ring=None if strided is None else _staging_ring(self._staging_bytes),
        )

    def counters(self) -> dict[str, Any]:
        """The counters of this rank for ``graft_info``."""
        shape = self._geometry.shape
        return {
            "engine": type(self._engine).__name__,
            "slots": shape.num_slots,
            "slot_bytes": shape.slot_bytes,
            "ranks_of_a_page": self._geometry.replicas,
            "shared": self._geometry.sharing is not None,
            "orphaned_regions": self._pool.orphans if self._pool is not None else 0,
            "strided_copies": self._engine is not None and self._engine.strided,
            "staged_loads": self._engine is not None and self._engine.staged,
            **self._counters,
        }

    @property
    def engine(self) -> CopyEngine:
        """The copy engine. It exists after the KV caches were registered."""
        if self._engine is None:
            raise GraftError("the host KV cache was used before vLLM registered its KV caches")
        return self._engine

    def begin_loads(self, metadata: HiCacheMetadata) -> None:
        """Submit the loads within a step before :meth:`start_loads`, if that is possible."""
        # vLLM moves recurrent states between blocks while it prepares the step.
        if not metadata.sync_loads or self._has_states:
            return
        self.before_step(metadata)
        self._load(metadata, by_layer=True)
        self._counters["early_loads"] += 1
        self._begun = metadata

    def before_step(self, metadata: HiCacheMetadata) -> None:
        """Store freed blocks, and fence blocks that are still read, before the step may write."""
        if metadata is self._begun:
            return
        self.engine.begin_step(metadata.step)
        self._store(metadata.early_stores)
        if metadata.fences:
            self.engine.fence(metadata.fences)

    def start_loads(self, metadata: HiCacheMetadata, hooks_run: bool) -> None:
        """Submit this step's loads.

        Attention layers do not call :meth:`wait_layer` (``hooks_run``) if a FULL graph is replayed.
        Then the compute stream waits here for the whole load.
        """
        if metadata.sync_loads:
            self._counters["layerwise_steps" if hooks_run else "full_graph_steps"] += 1
            begun, self._begun = metadata is self._begun, None
            if not begun:
                self._load(metadata, by_layer=hooks_run)
            if hooks_run:
                for layer in self._unhooked:
                    self.engine.wait_layer(layer)
            else:
                # A load that was begun early is copied layer by layer.
                self.engine.wait_all_layers()
            self._check_loads()
        self._fail(metadata.failed_blocks)
        self._later_loads += sorted(metadata.async_loads, key=lambda load: load.priority)
        if not metadata.sync_loads:
            self._load_later()

    def wait_layer(self, layer: str) -> None:
        self.engine.wait_layer(layer)

    def after_forward(self) -> None:
        """Let later work wait for all layers, and submit the loads outside of steps."""
        unwaited = self.engine.wait_all_layers()
        self._check_loads()
        self._load_later()
        self._report.unwaited_layers += unwaited
        self._counters["unwaited_layers"] += unwaited

    def store(self, metadata: HiCacheMetadata) -> None:
        """Submit the step's stores, after all of its work was submitted."""
        self.engine.end_step()
        self._store(metadata.stores)

    def results(self, metadata: HiCacheMetadata) -> KVConnectorTransferResults:
        """The requests whose loads have ended since the last call, including failed ones."""
        received: set[str] = set(metadata.failed_loads)
        failed: set[str] = set(metadata.failed_loads)
        self._report.steps |= self.engine.step_seconds()
        for result in self.engine.finished():
            operation = result.operation
            self._report.mark(operation.ids, result.failed)
            self._report.unfit.update(result.unfit)
            load = operation.direction is Direction.LOAD
            if not result.failed:
                totals = self._report.loads if load else self._report.stores
                totals.add(
                    result.num_bytes, result.seconds, result.strided_bytes, result.staged_bytes
                )
            direction = "load" if load else "store"
            self._counters[f"failed_{direction}s" if result.failed else f"{direction}s"] += 1
            self._counters[f"{direction}_bytes"] += result.num_bytes
            self._counters[f"{direction}_strided_bytes"] += result.strided_bytes
            if load:
                self._counters["load_staged_bytes"] += result.staged_bytes
            waiting = self._async_loads.keys() & operation.ids
            requests = {self._async_loads.pop(job) for job in waiting}
            received |= requests
            failed |= requests if result.failed else set()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def take_invalid_blocks(self) -> set[int]:
        """The invalid blocks that this step has read. vLLM ends their requests."""
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return blocks

    def take_report(self) -> HiCacheReport | None:
        """The report since the last call; None if it is empty."""
        if self._report.empty:
            return None
        report, self._report = self._report, HiCacheReport()
        return report

    def close(self) -> None:
        if self._engine is not None:
            self._engine.drain()
            self._engine = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _load(self, metadata: HiCacheMetadata, by_layer: bool) -> None:
        operation = merge_ops(metadata.sync_loads)
        if operation is not None and by_layer:
            self.engine.load_layers(operation, self._unhooked)
        elif operation is not None:
            self.engine.load_now(operation)

    def _load_later(self) -> None:
        loads, self._later_loads = self._later_loads, []
        for load in loads:
            self._async_loads.update(zip(load.ids, load.request_ids))
            self.engine.load(load)

    def _check_loads(self) -> None:
        self._counters["second_tries"] = self.engine.second_tries
        for operation in self.engine.take_incomplete():
            self._fail(block for part in operation.transfers for block in part.device_indices)

    def _fail(self, blocks: Iterable[int]) -> None:
        found = set(blocks)
        if found and not self._geometry.fails_blocks:  # vLLM can't end just their requests.
            raise_incomplete()
        self._invalid_blocks |= found

    def _store(self, stores: list[Any]) -> None:
        operation = merge_ops(stores)
        if operation is None:
            return
        # Ranks that hold the same KV share the pages. A page is read once all have reported.
        share = share_of(operation, self._rank, self._geometry.replicas)
        if share is None:
            self._report.mark(operation.ids)
            return
        self.engine.store(share)
        if self._geometry.zeroes_blocks:
            # vLLM zeroes reused blocks before it calls us in the next step, so a fence then would
            # come too late. The compute stream has to wait for the store now.
            self.engine.fence(operation.ids)


def hook_early_loads() -> None:
    """Let the model runner of this process begin our loads before it prepares a step's inputs.

    Until vLLM calls a connector, the link to host memory would be idle, although a prompt waits for
    its prefix. A load has to come after vLLM has zeroed reused blocks and copied shared ones, and
    vLLM submits that work even earlier.
    """
    # A model runner builds a rank's connector, so its module is loaded. Model runners other than V2
    # have no such place to hook, so their loads begin with the forward pass.
    if (module := sys.modules.get("vllm.v1.worker.gpu.model_runner")) is not None:
        wrap(module.GPUModelRunner, "gather_batch_req_state", _then_gather)


def _then_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    def gather_batch_req_state(self: Any, scheduler_output: Any, dummy_run: bool) -> Any:
        metadata = None if dummy_run else scheduler_output.kv_connector_metadata
        # The metadata may be another connector's.
        if isinstance(metadata, HiCacheMetadata) and metadata.sync_loads:
            connector: Any = get_kv_transfer_group()
            connector.begin_loads(metadata)
        return original(self, scheduler_output, dummy_run)

    return gather_batch_req_state


def _conversion(geometry: Geometry, fp8: Callable[..., Any], packed: Convert) -> dict[str, Any]:
    """The options of a copy engine that say how K/V gets the host's form."""
    if geometry.form is None:
        return {}
    if geometry.form is FP8:
        return {"convert": partial(fp8, geometry.convert_from)}
    return {"convert": packed, "unfit": unfit}


def _strided_driver() -> CudaDriver | None:
    try:
        return CudaDriver.load(torch.cuda.current_device())
    except CudaDriverError as error:
        # Users cannot ask for 2D copies, so it is no error. Counters tell the bytes of each method.
        logger.warning("host KV cache: no 2D copies, all go by other ways: %s", error)
        return None


def _staging_ring(num_bytes: int) -> StagingRing | None:
    if not num_bytes:
        return None
    from vllm_graft.hicache.copies.row_copies import StagingRing

    try:
        return StagingRing.allocate(num_bytes)
    except RuntimeError as error:  # It comes from torch, or from the allocator that vLLM sets.
        # Loads work without the ring, but more slowly. Counters tell the bytes of each method.
        logger.warning(
            "host KV cache: no %d bytes of device memory for %s, loads of scattered blocks go by "
            "other ways: %s",
            num_bytes,
            flag("staging_bytes"),
            error,
        )
        return None


def _check_dtypes(geometry: Geometry, caches: Mapping[str, torch.Tensor]) -> None:
    """Refuse KV caches of another dtype than their spec says, as conversion would corrupt them."""
    for name in (name for group in geometry.groups for name in group.layers):
        if geometry.convert_from not in (None, caches[name].dtype):
            raise GraftError(
                f"the KV cache of {name} is {caches[name].dtype}, but its spec says "
                f"{geometry.convert_from}. Please report this with the model's name."
            )


def _numa_node(device: torch.device) -> int | None:
    properties = torch.cuda.get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    place: list[Any] = [getattr(properties, name, None) for name in names]
    return None if None in place else node_of_gpu("{:04x}:{:02x}:{:02x}.0".format(*place))
