"""The KV connector that vLLM loads. It passes calls on to the scheduler's or the rank's side."""

from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import CUDAGraphMode, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.forward_context import ForwardContext
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from vllm_graft.hicache.config.cache_config import HiCacheConfig
from vllm_graft.hicache.messages.cache_stats import HiCacheProm, HiCacheStats
from vllm_graft.hicache.messages.step_metadata import HiCacheMetadata
from vllm_graft.hicache.pages.geometry import Geometry
from vllm_graft.hicache.planning.scheduler import HiCacheScheduler
from vllm_graft.hicache.rank.worker import HiCacheWorker, hook_early_loads
from vllm_graft.hicache.setup import make_scheduler, require_storage_room
from vllm_graft.seams.permission import require_seams


class HiCacheConnector(KVConnectorBase_V1, SupportsHMA):
    """The host KV cache as a KV connector. ``docs/hicache.md`` describes its extra config."""

    _cache_hit_source = CacheHitSource.HOST

    scheduler: HiCacheScheduler
    """The scheduler's side. It exists only in the role SCHEDULER."""
    worker: HiCacheWorker
    """The rank's side. It exists only in the role WORKER."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        require_seams("core", "hicache")
        config = HiCacheConfig.parse(self._kv_transfer_config.kv_connector_extra_config)
        geometry = Geometry.of(config, vllm_config, kv_cache_config)
        require_storage_room(config, geometry)
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler = make_scheduler(config, geometry, vllm_config, kv_cache_config)
        else:
            hook_early_loads()
            rank, num_blocks = vllm_config.parallel_config.rank, kv_cache_config.num_blocks
            self.worker = HiCacheWorker(geometry, rank, num_blocks, int(config.staging_bytes))

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False, because a cache may drop a page without harm."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        config = HiCacheConfig.from_vllm(vllm_config)
        return config.kv_layout if config is not None else None

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """No: copies know the KV cache by its addresses, and sleep gives them up."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return False, because a FULL graph's stream waits for loads before its replay."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HiCacheStats:
        return HiCacheStats(data=data) if data is not None else HiCacheStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> HiCacheProm:
        return HiCacheProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker.register(kv_caches, self._hooked_layers())

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step, before it overwrites blocks."""
        self.worker.before_step(_ours(kv_connector_metadata))

    def begin_loads(self, metadata: HiCacheMetadata) -> None:
        """Begin a step's loads before vLLM prepares its inputs; see ``hook_early_loads``."""
        self.worker.begin_loads(metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Submit loads. vLLM passes ``attn_metadata`` here only if the step is a FULL graph."""
        full = (
            "attn_metadata" in kwargs
            or forward_context.cudagraph_runtime_mode is CUDAGraphMode.FULL
        )
        hooks_run = not full and forward_context.attn_metadata is not None
        self.worker.start_loads(_ours(self._get_connector_metadata()), hooks_run)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.worker.wait_layer(layer_name)

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because blocks are stored after the step."""

    def finish_forward(self) -> None:
        """Let the compute stream wait for all layers, after the target's forward pass."""
        self.worker.after_forward()

    def wait_for_save(self) -> None:
        self.worker.after_forward()
        self.worker.store(_ours(self._get_connector_metadata()))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self.worker.results(_ours(self._get_connector_metadata()))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self.get_transfer_results(finished_req_ids).finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.take_invalid_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker.take_report()

    def shutdown(self) -> None:
        side = self.scheduler if self.role is KVConnectorRole.SCHEDULER else self.worker
        side.close()

    def on_new_request(self, request: Request) -> None:
        self.scheduler.arrived(request)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self.scheduler.bind(gpu_block_pool)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler.lookup(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        return self.scheduler.hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler.build(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler.report(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler.finished(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether copies are in flight. Only a step can report their end."""
        return self.scheduler.busy

    def get_kv_connector_stats(self) -> HiCacheStats | None:
        """The counters since the last call. Those of the ranks come with their reports."""
        return self.scheduler.take_stats() if self.role is KVConnectorRole.SCHEDULER else None

    def take_events(self) -> Iterable[Any]:
        return ()

    def reset_cache(self) -> bool:
        return self.scheduler.reset()

    def _hooked_layers(self) -> set[str]:
        """The names of layers whose attention calls :meth:`wait_for_layer_load`."""
        from vllm.model_executor.layers.attention import Attention, MLAAttention

        layers = self._vllm_config.compilation_config.static_forward_context
        return {
            name for name, layer in layers.items() if isinstance(layer, (Attention, MLAAttention))
        }


def _ours(metadata: KVConnectorMetadata) -> HiCacheMetadata:
    if not isinstance(metadata, HiCacheMetadata):
        raise TypeError(f"expected HiCacheMetadata, got {type(metadata).__name__}")
    return metadata
