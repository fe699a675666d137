"""CUDA graphs of the draft: a tree's levels, or a chain's loop, as one graph per batch size."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed import parallel_state
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from vllm_graft.base.log import warning_once
from vllm_graft.graph_runners.language.widths import plan_widths
from vllm_graft.seams import graph_tables
from vllm_graft.seams.ranks import all_ranks_agree

_CONTEXT = "GraphCaptureContext"

Results = list[torch.Tensor]
"""Copies of what a pass drafted for the requests of a batch, without padding."""


@contextlib.contextmanager
def one_capture_stream(device: torch.device) -> Iterator[None]:
    """A context in which all managers capture on one stream, where vLLM takes one stream for each.
    All graphs share a pool, but torch's allocator gives memory of one stream to no other, and
    cuBLAS has one workspace per stream. The graphs of a pool never run at once."""
    stock = parallel_state.GraphCaptureContext
    shared = stock(torch.cuda.Stream(device=device))
    setattr(parallel_state, _CONTEXT, lambda _: shared)
    try:
        yield
    finally:
        setattr(parallel_state, _CONTEXT, stock)


class DraftGraphRunner(CudaGraphManager):
    """Captures the passes of a draft, and says which captured size fits a batch.

    It is one of vLLM's `CudaGraphManager`s and an attribute of the speculator: so vLLM's memory
    profiling finds, measures and drops its graphs, and all graphs share the engine's pool. Batches
    are padded to the next captured size; padding rows have request-state index -1 and no prefix.
    `topk` is the number of rows per request; 1 for a chain."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        cudagraph_mode: CUDAGraphMode,
        topk: int,
    ) -> None:
        super().__init__(vllm_config, device, self.resolve(cudagraph_mode), topk)
        # Where the number of drafts varies, vLLM also plans widths for the target's queries.
        planned = [desc for desc in graph_tables.planned(self) if desc.uniform_token_count == topk]
        graph_tables.plan(self, planned)
        if self.cudagraph_mode and not planned:
            largest = topk * self.max_num_reqs
            warning_once(
                f"drafts run without CUDA graphs: a graph has {topk} rows per request (a tree's: "
                "--additional-config.graft.tree.topk), and no size in "
                f"compilation_config.cudagraph_capture_sizes "
                f"{self.compilation_config.cudagraph_capture_sizes} makes whole requests of at "
                f"most max_num_seqs {self.max_num_reqs}: add sizes from {topk} to {largest}"
            )

    def planned_counts(self) -> list[int]:
        """Numbers of requests that graphs are planned for, ascending."""
        return sorted({desc.num_reqs or 0 for desc in graph_tables.planned(self)})

    def plan_counts(self, counts: Sequence[int]) -> None:
        """Plan these numbers of requests, whatever the engine's sizes are."""
        plan_widths(self, {self.decode_query_len: counts})

    def keep_sizes(self, batches: Collection[int]) -> None:
        """Plan only the sizes that one of `batches`, numbers of requests, is padded to."""
        wanted = set(batches)
        kept = [
            desc
            for desc in graph_tables.planned(self)
            if not wanted.isdisjoint(self.batch_sizes(desc.num_reqs or 0))
        ]
        graph_tables.plan(self, kept)
        # A graph that is not captured must not be chosen.
        for descs in graph_tables.serving(self).values():
            descs[:] = [desc for desc in descs if desc in kept]

    def dispatch(
        self, num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any
    ) -> BatchExecutionDescriptor:
        """The graph that a batch takes, on which data-parallel ranks have agreed, or none."""
        desc = super().dispatch(num_reqs, num_tokens, *args, **kwargs)
        if self.may_replay(desc):
            return desc
        return dataclasses.replace(
            desc,
            cg_mode=CUDAGraphMode.NONE,
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            uniform_token_count=None,
        )

    def may_replay(self, desc: BatchExecutionDescriptor) -> bool:
        """Whether a graph may serve a batch that fits it."""
        return True

    @staticmethod
    def resolve(mode: CUDAGraphMode) -> CUDAGraphMode:
        """The mode of the levels under the engine's `mode`. They are the same rows for every
        request, so they are captured where decodes are, as a whole."""
        if mode.decode_mode() == CUDAGraphMode.FULL:
            return CUDAGraphMode.FULL_DECODE_ONLY
        return CUDAGraphMode.NONE

    def batch_sizes(self, num_reqs: int) -> range:
        """Numbers of requests of the batches that are padded to the graph of `num_reqs`."""
        smaller = [size for size in self.planned_counts() if size < num_reqs]
        return range(1 + max(smaller, default=0), num_reqs + 1)

    def capture_levels(self, draft: Callable[[int], None]) -> None:
        """Capture `draft(num_reqs)` at every size, the largest first."""
        self.capture_passes(
            lambda num_reqs: functools.partial(draft, num_reqs), "Capturing draft tree CUDA graphs"
        )

    def capture_passes(self, prepare: Callable[[int], Callable[[], None]], title: str) -> None:
        """Capture what `prepare(num_reqs)` returns at every size, the largest first. It is called
        outside of the graph, before warm-up and capture. The progress bar shows `title`."""

        def create(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], None]:
            num_reqs: Any = desc.num_reqs
            run = prepare(num_reqs)
            return lambda mode: run()

        super().capture(create, title)

    def replay(
        self,
        desc: BatchExecutionDescriptor,
        launch: Callable[[], None],
        results: Callable[[], Results],
    ) -> None:
        """Draft by the FULL graph that fits a batch; its static inputs are in place. `launch`
        drafts the same without a graph, padding included, any number of times. `results` returns
        copies of what was drafted for the batch's requests."""
        self.run_fullgraph(desc)

    def checks(self) -> dict[str, list[int]]:
        """What `graft_info()` says about checks: graphs, by number of requests, per outcome."""
        return {}


class VerifyingDraftRunner(DraftGraphRunner):
    """Compares the first replay of each size with launches; a size that differs is not replayed.
    Tensor-parallel ranks decide together. If one rank replayed what another launches, a captured
    all-reduce would read buffers of the peer that the launch does not fill."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._equal: dict[BatchExecutionDescriptor, bool] = {}

    def may_replay(self, desc: BatchExecutionDescriptor) -> bool:
        return self._equal.get(desc, True)

    def replay(
        self,
        desc: BatchExecutionDescriptor,
        launch: Callable[[], None],
        results: Callable[[], Results],
    ) -> None:
        """Draft by the graph, and the first time by launches as well, whose drafts then stay."""
        self.run_fullgraph(desc)
        if desc in self._equal:
            return
        found = results()
        launch()
        own = all(torch.equal(a, b) for a, b in zip(found, results(), strict=True))
        self._equal[desc] = all_ranks_agree(own)
        if not self._equal[desc]:
            warning_once(
                f"the draft's CUDA graph of {desc.num_reqs} requests ({desc.num_tokens} rows) "
                "drafts something else than its launches: batches of this size are launched from "
                "now on"
            )

    def checks(self) -> dict[str, list[int]]:
        return {
            outcome: sorted(desc.num_reqs or 0 for desc, equal in self._equal.items() if equal is e)
            for outcome, e in (("verified", True), ("differing", False))
        }


class EagerDraftRunner(DraftGraphRunner):
    """Never captures; meant for debugging and for comparisons."""

    @staticmethod
    def resolve(mode: CUDAGraphMode) -> CUDAGraphMode:
        return CUDAGraphMode.NONE
