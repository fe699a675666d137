"""The graph runner of vision encoders, in the place of vLLM's ``EncoderCudaGraphManager``."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

from vllm_graft.base import info
from vllm_graft.base.log import logger, warning_once
from vllm_graft.base.options import flag
from vllm_graft.graph_runners.vision import replay_plan as plan
from vllm_graft.graph_runners.vision.capture.admission import Admission
from vllm_graft.graph_runners.vision.capture.backends import make_backend
from vllm_graft.graph_runners.vision.capture.rate import Never, Rate, TimeShare
from vllm_graft.graph_runners.vision.graphs.graph_store import GraphStore, Measured
from vllm_graft.graph_runners.vision.large_batches import CutGain
from vllm_graft.graph_runners.vision.startup_captures import (
    DEFAULT_MAX_PATCHES,
    all_ranks_agree,
    capture_buckets,
    check_room,
    find_obstacle,
    fused_passes_pay,
    plan_buckets,
    prepare,
)
from vllm_graft.graph_runners.vision.towers.protocol import packs_offsets, tower_of
from vllm_graft.graph_runners.vision.towers.tower import Inputs, Item
from vllm_graft.graph_runners.vision.graphs.vision_stats import VitStats
from vllm_graft.graph_runners.vision.vision_config import VitConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Outputs = list[torch.Tensor]


class ViTCudaGraphRunner(EncoderCudaGraphManager):
    """Exact graphs of hot layouts, padded buckets for the rest, else the engine's own path.

    `execute` returns None for what it does not serve, and both model runners then call the model's
    ``embed_multimodal``. What it returns are clones.

    Captured when the engine starts: the buckets. While it serves: layouts that are seen often,
    after the batch was answered, within `capture_share` of the wall time, unless the tower is
    sharded over ranks: these have to decide alike, and capture at the start only.
    """

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, dtype: torch.dtype, model: Any
    ) -> None:
        """As vLLM's manager, which reads its three ``encoder_cudagraph_*`` options."""
        super().__init__(vllm_config, device, dtype, model)
        self.options = VitConfig.from_vllm(vllm_config) or VitConfig()
        self.stats = VitStats()
        self.tower = tower_of(
            model, self.config, device, dtype, self.max_batch_size, self.max_frames_per_batch
        )
        # Ranks that share a tower have to decide alike.
        sharded = vllm_config.parallel_config.tensor_parallel_size > 1 and not self.use_dp
        self._agree = all_ranks_agree if sharded else bool
        backend = make_backend(device)
        self.admission: Admission[plan.LayoutKey] = Admission(self.options.min_hits)
        self.store = GraphStore(
            self.tower,
            backend,
            self.options.memory << 20,
            self.admission,
            self.stats,
            verify=self.options.verify,
            timing=not sharded,
            lockstep=sharded,
            roomy=self.options.max_patches is None and self.options.buckets is None,
        )
        self._rate: Rate = Never() if sharded else TimeShare(self.options.capture_share)
        self.cuts = CutGain(self.store, self.stats, self._rate, self.options.min_hits)
        budgets = vllm_config.compilation_config.encoder_cudagraph_token_budgets
        planned = plan_buckets(self.tower, self.options, budgets, not sharded)
        self._bucket_rows = [] if packs_offsets(model) else planned
        idle = sharded and not (self._bucket_rows or self.tower.startup())
        self._obstacle = find_obstacle(vllm_config, model, self.tower, backend.reads_device, idle)
        self.max_rows = self._plan_max_rows()
        self._captured = self._prepared = False
        self._publish()

    # vLLM's lifecycle

    def get_num_graphs_to_capture(self) -> int:
        """Graphs captured at the start; at least one, as vLLM profiles no memory for none."""
        return max(1, len(self._bucket_rows) + len(self.tower.startup()))

    def is_captured(self) -> bool:
        """Whether `capture` has run since the last `clear`."""
        return self._captured

    def supports_modality(self, modality: str) -> bool:
        """Whether `execute` may be asked; counts what it may not."""
        if modality in self.tower.modalities:
            return True
        self.stats.declines["modality"] += 1
        return False

    @torch.inference_mode()
    def capture(self, graph_pool: Any) -> None:
        """Capture what is captured at the start, and take the rest of the budget from the device.

        vLLM calls this to profile memory, then `clear`, then once more. So that its profile has
        the whole budget, the rest is held until the first batch.
        """
        self.graph_pool = graph_pool
        self.store.open(graph_pool)
        check_room(self.store, self.options.memory)
        if self._obstacle is None:
            with self.store.backend.stream():
                self._capture_startup()
        rest = self.store.budget.free
        if rest > 0 and not self.store.backend.hold(rest):
            self.store.budget.limit -= rest
            logger.warning(
                "%s=%d MiB are not there: vision graphs stay at the %d MiB that they have",
                flag("vit", "memory"),
                self.options.memory,
                self.store.budget.limit >> 20,
            )
        self._captured = True
        self._rate.start(time.monotonic())
        logger.info(
            "vision graphs: buckets of %s patches, %d MiB of %d in use",
            sorted(self.store.buckets) or "no",
            self.store.budget.used >> 20,
            self.store.budget.limit >> 20,
        )

    def clear(self) -> None:
        """Drop all graphs and their memory; `capture` may follow."""
        self.store.clear()
        super().clear()
        self._captured = False

    # Serving

    def execute(self, mm_kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """Embeddings of each item, or None for the engine's own path.

        Args:
            mm_kwargs: keyword arguments of ``embed_multimodal``, items of one modality.
        """
        reason = self._decline(mm_kwargs)
        if reason is None:
            if self.use_dp:
                # All ranks gather: below here, none may leave it to the engine.
                gathered: Outputs = super().execute(mm_kwargs)
                return gathered
            return self._try(mm_kwargs)
        self.stats.declines[reason] += 1
        return None

    @torch.inference_mode()
    def prewarm(self, mm_kwargs: dict[str, Any]) -> dict[plan.LayoutKey, str]:
        """Capture the exact graphs of these inputs now, whatever their counts and the rate.

        Returns:
            for each key ``captured``, or why it has no graph; under ``("too_large", 0)`` whether a
            batch that is larger than any graph is ``cut``.
        """
        if (reason := self._decline(mm_kwargs)) is not None:
            return {(reason, 0): reason}
        items = self.tower.items(mm_kwargs)
        large = sum(item.rows for item in items) > self.max_rows
        if large and not self.cuts.possible(items, self.max_rows):
            return {("too_large", 0): "too_large"}
        found: dict[plan.LayoutKey, str] = {}
        exact = plan.groups(items, self.max_rows)
        for step in exact:
            if step.key is None:
                continue
            if step.key not in self.store.exact and step.key not in self.admission.refused:
                self._capture_step(step, mm_kwargs, items, None)
            found[step.key] = self.admission.refused.get(step.key, "captured")
        if large:
            found["too_large", 0] = "too_large"
            if steps := self._choose(items, exact, True):
                self.cuts.measure(mm_kwargs, items, lambda: self._run(steps, mm_kwargs, items))
                pays = self.cuts.pays[plan.size_class(items)]
                found["too_large", 0] = "cut" if pays else "no_gain"
        return found

    def _execute_local(self, mm_kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """This rank's share of a data-parallel tower."""
        with gpu_sync_allowed():
            items = self.tower.items(mm_kwargs)
        if not items:
            return []
        served = self._try(mm_kwargs)
        if served is None:
            with torch.inference_mode():
                served = self.tower.eager(mm_kwargs, range(len(items)))
        return served

    def _try(self, inputs: dict[str, Any]) -> Outputs | None:
        """Serve; a failure costs the batch its graphs, and not its answer."""
        try:
            served: Outputs | None = self._serve(inputs)
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            self.stats.fail(cause)
            self.stats.declines["error"] += 1
            warning_once(f"a vision graph failed, the batch runs without: {cause}")
            return None
        return served

    @torch.inference_mode()
    def _serve(self, inputs: dict[str, Any]) -> Outputs | None:
        self.store.backend.release()
        with gpu_sync_allowed():
            items = self.tower.items(inputs)
        large = sum(item.rows for item in items) > self.max_rows
        verdict = self.cuts.verdict(items, self.max_rows) if large else ""
        if verdict == "eager":
            return self._pass_large(inputs, items)
        exact = plan.groups(items, self.max_rows)
        self.admission.see(step.key for step in exact if step.key is not None)
        if any(self.admission.refused.get(step.key) == "no_gain" for step in exact):  # type: ignore[arg-type]
            # Padding would make it slower still.
            self._pass(items, "no_gain")
            return None
        steps = self._choose(items, exact, large)
        if verdict == "measure" and steps:
            self._answered_eagerly(items)
            return self.cuts.measure(inputs, items, lambda: self._run(steps, inputs, items))
        due = self._due(exact)
        # Where a graph of the whole batch is due, the eager pass is needed for its sake.
        whole = due is not None and len(due.indices) == len(items)
        outputs = None if steps is None or whole else self._replay(steps, inputs, items)
        if whole:
            self._answered_eagerly(items)
        elif outputs is None:
            # What was planned did not fit: more attention segments than a bucket has room for.
            reason = "too_large" if large else "no_graph"
            self._pass(items, reason if steps is None else "segments")
            if due is None:
                return None
        elif large:
            self.stats.cuts += 1
        return outputs if due is None else self._answer_then_capture(due, outputs, inputs, items)

    def _pass_large(self, inputs: Inputs, items: Sequence[Item]) -> Outputs | None:
        """Larger than any graph: by the model's pass with fused blocks, or left to the engine."""
        if not self.cuts.fused:
            self._pass(items, "too_large")
            return None
        outputs = self.tower.eager_fused(inputs, range(len(items)))
        self.stats.items["fused"] += len(items)
        self.graph_misses += len(items)
        return outputs

    def _choose(
        self, items: Sequence[Item], exact: Sequence[plan.Step], cut: bool
    ) -> list[plan.Step] | None:
        buckets = sorted(self.store.buckets)
        return plan.choose(items, exact, self.store.exact, buckets, self.max_batch_size, cut)

    def _replay(
        self, steps: Sequence[plan.Step], inputs: Inputs, items: Sequence[Item]
    ) -> Outputs | None:
        outputs = self._run(steps, inputs, items)
        if outputs is not None:
            for step in steps:
                self._count(step)
        return outputs

    def _run(
        self, steps: Sequence[plan.Step], inputs: Inputs, items: Sequence[Item]
    ) -> Outputs | None:
        outputs: list[Any] = [None] * len(items)
        for step in steps:
            run = self.store.replay_exact if step.bucket is None else self.store.replay_bucket
            found = run(step, inputs, items)
            if found is None:
                return None
            for index, output in zip(step.indices, found, strict=True):
                outputs[index] = output
        return outputs

    def _answer_then_capture(
        self, due: plan.Step, outputs: Outputs | None, inputs: Inputs, items: Sequence[Item]
    ) -> Outputs:
        eager: Measured | None = None
        if outputs is None and len(due.indices) == len(items):
            # The batch is one group, in order.
            eager = self.store.measure(inputs, due.indices)
            outputs = eager.outputs
        elif outputs is None:
            outputs = self.tower.eager(inputs, range(len(items)))
        start = time.perf_counter()
        self._capture_step(due, inputs, items, eager)
        seconds = time.perf_counter() - start
        self._rate.spent(seconds)
        self.stats.capture_seconds += seconds
        return outputs

    def _due(self, exact: Sequence[plan.Step]) -> plan.Step | None:
        """The first key that deserves a graph now, and none deserves it more."""
        live = self.store.exact
        for step in exact:
            key = step.key
            if key is None or key in live or not self.admission.wants(key):
                continue
            if not self._rate.ready(time.monotonic()):
                return None
            if self._rate.plenty or self.admission.is_hottest(key, live):
                return step
        return None

    def _capture_step(
        self, step: plan.Step, inputs: Inputs, items: Sequence[Item], eager: Measured | None
    ) -> None:
        """Capture an exact graph; a failure costs its key the graph, and nobody an answer."""
        try:
            why = self.store.capture_exact(step, inputs, items, eager)
        except Exception as error:
            why = "error"
            cause = f"{step.key}: {type(error).__name__}: {error}"
            self.stats.fail(cause)
            logger.warning("vision graph was not captured: %s", cause)
        if why is None:
            self.stats.captures["exact"] += 1
            return
        self.stats.dropped[why] += 1
        if step.key is not None:
            # Other graphs may go, and leave room; the next capture fuses nothing.
            self.admission.refuse(step.key, why, for_now=why in ("no_room", "memory", "bits"))

    def _capture_startup(self) -> None:
        """Buckets, and the layouts that the tower knows beforehand."""
        first, self._prepared = not self._prepared, True  # vLLM captures twice.
        if first:
            prepare(self.store, self.options, self._agree)
        pays = self.options.max_patches is None
        frames = self.vllm_config.compilation_config.encoder_cudagraph_max_frames_per_batch or 0
        kept = capture_buckets(self.store, self._bucket_rows, frames, pays, self._agree)
        # vLLM captures twice: what was dropped need not be tried again.
        self._bucket_rows = kept
        if pays and kept:
            self.max_rows = max(kept)
        if first:
            self.cuts.fused_pays = fused_passes_pay(self.store, self.max_rows)
        for inputs in self.tower.startup():
            items = self.tower.items(inputs)
            for step in plan.groups(items, self.max_rows):
                if step.key is not None and step.key not in self.store.exact:
                    self._capture_step(step, inputs, items, None)
                    kept_here = step.key in self.store.exact
                    if not self._agree(kept_here) and kept_here:
                        self.store.drop_exact(step.key)

    # Decisions of the start

    def _plan_max_rows(self) -> int:
        if self.options.max_patches is not None:
            return self.options.max_patches
        return max(self._bucket_rows, default=DEFAULT_MAX_PATCHES)

    # Counting

    def _decline(self, inputs: Inputs) -> str | None:
        if not self._captured:
            return "not_captured"
        if self._obstacle is not None:
            return self._obstacle
        with gpu_sync_allowed():
            return self.tower.decline(inputs)

    def _pass(self, items: Sequence[Item], reason: str) -> None:
        """Count a batch for the engine's own path."""
        self.stats.declines[reason] += 1
        self._answered_eagerly(items)

    def _answered_eagerly(self, items: Sequence[Item]) -> None:
        self.stats.items["eager"] += len(items)
        self.graph_misses += len(items)

    def _count(self, step: plan.Step) -> None:
        tier = "exact" if step.bucket is None else "bucket"
        self.stats.replays[tier] += 1
        self.stats.items[tier] += len(step.indices)
        self.graph_hits += len(step.indices)
        if step.bucket is not None:
            self.stats.rows += step.rows
            self.stats.padded_rows += step.bucket

    def report(self) -> dict[str, Any]:
        """Counters and what is captured now, as plain values."""
        store = self.store
        return {
            **self.stats.report(),
            "tower": type(self.tower).__name__,
            "fused": self.tower.fused or f"no: {self.tower.why_not_fused}",
            "fused_passes": self.cuts.fused,
            "graphs": {"exact": len(store.exact), "bucket": len(store.buckets)},
            "buckets": sorted(store.buckets),
            "refused": len(self.admission.refused),
            "max_patches": self.max_rows,
            "metadata": store.metadata.report(),
            "bytes": store.budget.used,
            "bytes_of": {str(owner): size for owner, size in store.budget.owners.items()},
            "bytes_limit": store.budget.limit,
        }

    def _publish(self) -> None:
        reference = weakref.ref(self)
        info.publish("vit", lambda: runner.report() if (runner := reference()) else {})
