"""CUDA graphs of the draft: a tree's levels, or a chain's loop, as one graph a batch size."""

from __future__ import annotations

import bisect
import functools
from typing import TYPE_CHECKING, Any

from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from vllm_graft.graph_runners.widths import plan_widths
from vllm_graft.log import warning_once

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import torch
    from vllm.config import VllmConfig


class DraftGraphRunner(CudaGraphManager):
    """Captures the passes of a draft, and says which captured size serves a batch.

    A `CudaGraphManager` of vLLM's, held directly by the speculator: vLLM's memory profiling then
    finds, measures and drops its graphs, and all graphs share the engine's pool. Batches are
    padded to the next captured size; padding rows have request-state index -1 and no prefix.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        cudagraph_mode: CUDAGraphMode,
        topk: int,
    ) -> None:
        """Plan the sizes: the engine's capture sizes in rows, `topk` rows a request (chain: 1)."""
        super().__init__(vllm_config, device, self.resolve(cudagraph_mode), topk)
        # Where the number of drafts varies, vLLM takes a width above it for a target's query.
        self._capture_descs: dict[CUDAGraphMode, list[BatchExecutionDescriptor]] = {
            mode: [desc for desc in descs if desc.uniform_token_count == topk]
            for mode, descs in self._capture_descs.items()
        }
        if self.cudagraph_mode and not self._capture_descs.get(CUDAGraphMode.FULL):
            largest = topk * self.max_num_reqs
            warning_once(
                f"drafts run without CUDA graphs: a graph has {topk} rows a request (a tree's: "
                "--additional-config.graft.eagle.topk), and no size in "
                f"compilation_config.cudagraph_capture_sizes "
                f"{self.compilation_config.cudagraph_capture_sizes} makes whole requests of at "
                f"most max_num_seqs {self.max_num_reqs}: add sizes from {topk} to {largest}"
            )

    def planned_counts(self) -> list[int]:
        """Numbers of requests that graphs are planned for, ascending."""
        descs = self._capture_descs.get(CUDAGraphMode.FULL, [])
        return sorted({desc.num_reqs or 0 for desc in descs})

    def plan_counts(self, counts: Sequence[int]) -> None:
        """Plan these numbers of requests, whatever the engine's sizes are."""
        plan_widths(self, {self.decode_query_len: counts})

    def keep_sizes(self, batches: Collection[int]) -> None:
        """Plan only the sizes that serve one of `batches`, numbers of requests."""
        ordered = sorted(batches)

        def serves(desc: BatchExecutionDescriptor) -> bool:
            sizes = self.batch_sizes(desc.num_reqs or 0)
            place = bisect.bisect_left(ordered, sizes.start)
            return place < len(ordered) and ordered[place] in sizes

        kept = {
            mode: [desc for desc in descs if serves(desc)]
            for mode, descs in self._capture_descs.items()
        }
        self._capture_descs = {mode: descs for mode, descs in kept.items() if descs}
        # What is not captured must not be chosen.
        captured = {desc for descs in self._capture_descs.values() for desc in descs}
        for descs in self._candidates.values():
            descs[:] = [desc for desc in descs if desc in captured]

    @staticmethod
    def resolve(mode: CUDAGraphMode) -> CUDAGraphMode:
        """Return the mode of the levels under the engine's `mode`.

        The levels are the same rows for every request, so they are captured where the engine
        captures decodes as a whole, and never piecewise.
        """
        if mode.decode_mode() == CUDAGraphMode.FULL:
            return CUDAGraphMode.FULL_DECODE_ONLY
        return CUDAGraphMode.NONE

    def batch_sizes(self, num_reqs: int) -> range:
        """Numbers of requests that the graph of `num_reqs` serves, padding the others."""
        sizes = {desc.num_reqs or 0 for desc in self._capture_descs.get(CUDAGraphMode.FULL, [])}
        return range(1 + max((size for size in sizes if size < num_reqs), default=0), num_reqs + 1)

    def capture_levels(self, draft: Callable[[int], None]) -> None:
        """Capture `draft(num_reqs)` at every size, the largest first."""
        self.capture_passes(
            lambda num_reqs: functools.partial(draft, num_reqs), "Capturing draft tree CUDA graphs"
        )

    def capture_passes(self, prepare: Callable[[int], Callable[[], None]], title: str) -> None:
        """Capture what `prepare(num_reqs)` returns at every size, the largest first.

        Args:
            prepare: called outside the graph, before the warm-up and again before the capture.
            title: for the progress bar.
        """

        def create(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], None]:
            num_reqs: Any = desc.num_reqs
            run = prepare(num_reqs)
            return lambda mode: run()

        super().capture(create, title)


class EagerDraftRunner(DraftGraphRunner):
    """Never captures: for debugging, and to compare with."""

    @staticmethod
    def resolve(mode: CUDAGraphMode) -> CUDAGraphMode:
        """No graphs, whatever the engine does."""
        return CUDAGraphMode.NONE
