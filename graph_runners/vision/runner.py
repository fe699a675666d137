"""The graph runner of vision encoders, which replaces vLLM's ``EncoderCudaGraphManager``."""

import time
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

from vllm_graft.base import info
from vllm_graft.base.log import logger, warning_once
from vllm_graft.base.metric import Numbers
from vllm_graft.base.options import flag
from vllm_graft.graph_runners.vision.bucket_plan import plan_buckets
from vllm_graft.graph_runners.vision.capture.admission import Admission, TimeShare
from vllm_graft.graph_runners.vision.capture.graph_backend import make_backend
from vllm_graft.graph_runners.vision.captures import (
    ExactCaptures,
    StartupCaptures,
    check_room,
    find_obstacle,
)
from vllm_graft.graph_runners.vision.graphs.graph_store import GraphStore, StoreRules
from vllm_graft.graph_runners.vision.graphs.vision_batch import (
    ExactReplay,
    LayoutKey,
    Outputs,
    PaddedReplay,
    Replay,
    VisionBatch,
)
from vllm_graft.graph_runners.vision.graphs.vision_metrics import Reason, VitStats
from vllm_graft.graph_runners.vision.route import Answer, Route, Router
from vllm_graft.graph_runners.vision.towers.protocol import packs_offsets, tower_of
from vllm_graft.graph_runners.vision.towers.tower import Inputs
from vllm_graft.graph_runners.vision.vision_config import VitConfig
from vllm_graft.seams.ranks import all_ranks_agree


class ViTCudaGraphRunner(EncoderCudaGraphManager):
    """Serves hot layouts by exact graphs, and other batches by padded graphs.

    `execute` returns None for a batch that it does not serve; both of vLLM's model runners then
    call the model's ``embed_multimodal``. The embeddings that it returns are clones.

    Buckets are captured when the engine starts. Layouts that are seen often are captured while it
    serves: after their batch was answered, and within `capture_share` of the wall time. Ranks that
    share a tower have to decide alike, so they capture at the start only."""

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, dtype: torch.dtype, model: Any
    ) -> None:
        super().__init__(vllm_config, device, dtype, model)
        self.options = VitConfig.from_vllm(vllm_config) or VitConfig()
        self.stats = VitStats()
        self.tower = tower_of(
            model, self.config, device, dtype, self.max_batch_size, self.max_frames_per_batch
        )
        sharded = vllm_config.parallel_config.tensor_parallel_size > 1 and not self.use_dp
        self.admission: Admission[LayoutKey] = Admission(self.options.min_hits)
        self.store = self._make_store(device, sharded)
        rate = TimeShare(0 if sharded else self.options.capture_share)
        self.captures = ExactCaptures(self.store, self.admission, rate, self.stats)
        self.startup = self._plan_startup(vllm_config, sharded)
        self.router = Router(self.store, self.admission, rate, self.startup, self.max_batch_size)
        idle = sharded and not self.startup.number
        reads_device = self.store.backend.reads_device
        self._obstacle = find_obstacle(vllm_config, model, self.tower, reads_device, idle)
        self._captured = False
        info.publish("vit", info.weakly(self.report), info.weakly(self.numbers))

    def _make_store(self, device: torch.device, sharded: bool) -> GraphStore:
        options = self.options
        rules = StoreRules(
            verify=options.verify,
            timing=not sharded,
            lockstep=sharded,
            roomy=options.max_patches is None and options.buckets is None,
        )
        backend, limit = make_backend(device), options.memory << 20
        return GraphStore(self.tower, backend, limit, self.admission, self.stats, rules)

    def _plan_startup(self, vllm_config: VllmConfig, sharded: bool) -> StartupCaptures:
        compilation = vllm_config.compilation_config
        budgets = compilation.encoder_cudagraph_token_budgets
        planned = plan_buckets(self.tower, self.options, budgets, not sharded)
        return StartupCaptures(
            self.store,
            self.captures,
            self.options,
            bucket_rows=[] if packs_offsets(self.model) else planned,
            segments=compilation.encoder_cudagraph_max_frames_per_batch or 0,
            agree=all_ranks_agree if sharded else bool,
        )

    # vLLM's lifecycle

    def get_num_graphs_to_capture(self) -> int:
        # vLLM would otherwise not profile the memory of graphs.
        return max(1, self.startup.number)

    def is_captured(self) -> bool:
        return self._captured

    def supports_modality(self, modality: str) -> bool:
        """Whether `execute` takes items of this modality; counts a decline if not."""
        if modality in self.tower.modalities:
            return True
        self.stats.declines["modality"] += 1
        return False

    @torch.inference_mode()
    def capture(self, graph_pool: Any) -> None:
        """Capture the graphs of the start, and take the rest of the budget from the device. vLLM
        calls this to profile memory, then `clear`, then once more. The rest of the budget is held
        until the first batch, so that the profile includes all of it. Raises `ConfigError` if the
        budget holds no graph, or if the user asks for fused blocks and nothing can be fused."""
        self.graph_pool = graph_pool
        self.store.open(graph_pool)
        check_room(self.store, self.options.memory)
        if self._obstacle is None:
            with self.store.backend.stream():
                self.startup.capture()
        self._hold_rest()
        self._captured = True
        self.router.rate.start(time.monotonic())
        logger.info(
            "vision graphs: buckets of %s patches, %d MiB of %d in use",
            sorted(self.store.buckets) or "no",
            self.store.budget.used >> 20,
            self.store.budget.limit >> 20,
        )

    def _hold_rest(self) -> None:
        """Hold what is left of the budget; lower the budget if the device does not have it."""
        budget = self.store.budget
        rest = budget.free
        if rest > 0 and not self.store.backend.hold(rest):
            budget.limit -= rest
            logger.warning(
                "%s=%d MiB are not there: vision graphs stay at the %d MiB that they have",
                flag("vit", "memory"),
                self.options.memory,
                budget.limit >> 20,
            )

    def clear(self) -> None:
        self.store.clear()
        super().clear()
        self._captured = False

    # Serving

    def execute(self, mm_kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """The embeddings ``[tokens, hidden]`` of each item; None leaves the batch to the engine.
        `mm_kwargs` are those of ``embed_multimodal``, of one modality."""
        if (reason := self._obstacle_to(mm_kwargs)) is not None:
            self.stats.declines[reason] += 1
            return None
        if self.use_dp:
            # All ranks meet in a gather, so from here on no rank may leave its share to the engine.
            gathered: Outputs = super().execute(mm_kwargs)
            return gathered
        return self._serve(mm_kwargs)

    def _execute_local(self, mm_kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The embeddings of this rank's share of a batch, for a data-parallel tower."""
        with gpu_sync_allowed():
            number = len(self.tower.items(mm_kwargs))
        if not number:
            return []
        served = self._serve(mm_kwargs)
        if served is None:
            with torch.inference_mode():
                served = self.tower.eager(mm_kwargs, range(number))
        return served

    def _obstacle_to(self, inputs: Inputs) -> Reason | None:
        if not self._captured:
            return "not_captured"
        if self._obstacle is not None:
            return self._obstacle
        with gpu_sync_allowed():
            return self.tower.decline(inputs)

    def _serve(self, inputs: Inputs) -> Outputs | None:
        try:
            with torch.inference_mode():
                self.store.backend.release()
                with gpu_sync_allowed():
                    batch = VisionBatch.read(self.tower, inputs)
                return self._answer(batch)
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            self.stats.fail(cause)
            self.stats.declines["error"] += 1
            warning_once(f"a vision graph failed, the batch runs without: {cause}")
            return None

    def _answer(self, batch: VisionBatch) -> Outputs | None:
        route = self.router.route(batch)
        match route.answer:
            case Answer.REPLAY:
                return self._replay(route, batch)
            case Answer.CAPTURE:
                self._count_miss("eager", batch)
                eager = self.store.measure(batch, batch.indices)
                self.captures.capture_due(route.due, batch, eager)
                return eager.outputs
            case Answer.FUSED:
                outputs = self.tower.eager_fused(batch.inputs, batch.indices)
                self._count_miss("fused", batch)
                return outputs
            case Answer.DECLINE:
                return self._decline(route, batch, route.reason)

    def _replay(self, route: Route, batch: VisionBatch) -> Outputs | None:
        outputs = self.store.run(route.replays, batch)
        if outputs is None:
            # The items have more attention segments than their bucket has room for.
            return self._decline(route, batch, "segments")
        for replay in route.replays:
            self._count_replay(replay)
        self.captures.capture_due(route.due, batch)
        return outputs

    def _decline(self, route: Route, batch: VisionBatch, reason: Reason) -> Outputs | None:
        self.stats.declines[reason] += 1
        self._count_miss("eager", batch)
        if route.due is None:
            return None
        # A capture comes after its batch is answered, so the answer cannot be left to the engine.
        outputs = self.tower.eager(batch.inputs, batch.indices)
        self.captures.capture_due(route.due, batch)
        return outputs

    # Counters

    def _count_replay(self, replay: Replay) -> None:
        tier = "exact" if isinstance(replay, ExactReplay) else "bucket"
        self.stats.replays[tier] += 1
        self.stats.items[tier] += len(replay.indices)
        self.graph_hits += len(replay.indices)
        if isinstance(replay, PaddedReplay):
            self.stats.rows += replay.rows
            self.stats.padded_rows += replay.bucket

    def _count_miss(self, tier: str, batch: VisionBatch) -> None:
        self.stats.items[tier] += len(batch.items)
        self.graph_misses += len(batch.items)

    def report(self) -> dict[str, Any]:
        store = self.store
        return {
            **self.stats.report(),
            "tower": type(self.tower).__name__,
            "fused": self.tower.fused or f"no: {self.tower.why_not_fused}",
            "fused_passes": self.router.fused,
            "graphs": {"exact": len(store.exact), "bucket": len(store.buckets)},
            "buckets": sorted(store.buckets),
            "refused": len(self.admission.refused),
            "max_patches": self.startup.max_rows,
            "metadata": store.metadata.report(),
            "bytes": store.budget.used,
            "bytes_of": dict(store.budget.owners),
            "bytes_limit": store.budget.limit,
        }

    def numbers(self) -> Numbers:
        stats, store = self.stats, self.store
        return {
            "items": stats.items,
            "replays": stats.replays,
            "declines": stats.declines,
            "captures": stats.captures,
            "dropped_graphs": stats.dropped,
            "capture_seconds": stats.capture_seconds,
            "patches": stats.rows,
            "padding_patches": stats.padded_rows - stats.rows,
            "graphs": {"exact": len(store.exact), "bucket": len(store.buckets)},
            "memory_bytes": store.budget.used,
            "memory_limit_bytes": store.budget.limit,
        }
