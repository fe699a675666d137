"""The first pass of a standalone draft model as CUDA graphs, for chains and for trees."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from vllm_graft.graph_runners.language.draft import DraftGraphRunner

Metadata = dict[str, Any]

EXTEND_BACKENDS = {"FLASH_ATTN", "TRITON_ATTN"}
"""Attention backends that can refresh metadata of queries of several tokens on the device, too."""


@dataclass
class ExtendInputs:
    """The captured first pass's stand-in for `InputBatch`: each request has `width` rows.

    Attributes:
        width: rows per request, one more than its drafts.
        num_reqs: requests, padding included.
        seq_lens: int32 ``[max_reqs]``, tokens of each request, rejected drafts included; `width`
            in padding, so that its rows have keys to attend to.
        last_sampled: int32 ``[max_reqs]`` by request state. Memory holds one more element before
            the first, because padding has index -1.
        idx_mapping: int64 ``[max_reqs]``, the speculator's own; -1 in padding.
        seq_lens_cpu_upper_bound: not read, as attention metadata was made at capture.
    """

    width: int
    num_reqs: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    query_start_loc: torch.Tensor
    query_start_loc_np: np.ndarray
    seq_lens: torch.Tensor
    num_rejected: torch.Tensor
    last_sampled: torch.Tensor
    idx_mapping: torch.Tensor
    seq_lens_cpu_upper_bound: None = None

    @classmethod
    def allocate(cls, idx_mapping: torch.Tensor, width: int) -> Self:
        num_reqs, device = idx_mapping.shape[0], idx_mapping.device
        starts = np.arange(num_reqs + 1, dtype=np.int32) * width

        def zeros(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            width, num_reqs, input_ids=zeros(num_reqs * width),
            positions=zeros(num_reqs * width, torch.int64),
            query_start_loc=torch.tensor(starts, device=device), query_start_loc_np=starts,
            seq_lens=zeros(num_reqs) + width, num_rejected=zeros(num_reqs),
            last_sampled=zeros(num_reqs + 1)[1:], idx_mapping=idx_mapping,
        )  # fmt: skip

    @property
    def num_tokens(self) -> int:
        return self.num_reqs * self.width

    def fits(self, batch: InputBatch) -> bool:
        return batch.num_tokens == batch.num_reqs * self.width and bool(
            (batch.num_scheduled_tokens == self.width).all()
        )

    def load(
        self, batch: InputBatch, num_rejected: torch.Tensor, last_sampled: torch.Tensor
    ) -> None:
        """Copy a batch that `fits`; the rest becomes padding. `last_sampled` is by request."""
        num_reqs, num_tokens = batch.num_reqs, batch.num_tokens
        self.input_ids[:num_tokens].copy_(batch.input_ids[:num_tokens])
        self.positions[:num_tokens].copy_(batch.positions[:num_tokens])
        self.seq_lens[:num_reqs].copy_(batch.seq_lens[:num_reqs])
        self.seq_lens[num_reqs:].fill_(self.width)
        self.num_rejected[:num_reqs].copy_(num_rejected[:num_reqs])
        self.num_rejected[num_reqs:].zero_()
        self.last_sampled.copy_(last_sampled.flatten())

    def rows(self, num_reqs: int) -> Self:
        rows = num_reqs * self.width
        return replace(
            self, num_reqs=num_reqs, input_ids=self.input_ids[:rows],
            positions=self.positions[:rows], query_start_loc=self.query_start_loc[: num_reqs + 1],
            query_start_loc_np=self.query_start_loc_np[: num_reqs + 1],
            seq_lens=self.seq_lens[:num_reqs], num_rejected=self.num_rejected[:num_reqs],
            idx_mapping=self.idx_mapping[:num_reqs],
        )  # fmt: skip


class FirstPassGraphs(StandaloneARSpeculator):
    """Runs vLLM's first pass over a standalone draft model as a CUDA graph where one fits. The pass
    stays vLLM's, in graphs too: a capture records `_prefill` itself, over static stand-ins for its
    arguments and with attention metadata that the device refreshes. A batch that no graph fits,
    such as one with prompts, goes to the very same function."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._captured_metadata: Metadata | None = None

    def first_pass_graphs(self, width: int) -> tuple[ExtendInputs, DraftGraphRunner] | None:
        """The graphs for batches whose requests have `width` rows of the target, if there are any.
        The draft has one row more per request: the token that the target has drawn."""
        raise NotImplementedError

    def drafted_first(self, num_reqs: int) -> list[torch.Tensor]:
        """Copies of what the first pass has drafted for a batch's requests."""
        raise NotImplementedError

    def count_first_pass(self, *, replayed: bool) -> None:
        """Count a first pass that ran as a graph, or as launches because no graph fits."""
        raise NotImplementedError

    # --- graphs ---------------------------------------------------------------------------------

    @property
    def refreshes_first_pass(self) -> bool:
        """Whether the draft's attention can refresh metadata of a first pass on the device."""
        names = {group.backend.get_name() for groups in self.attn_groups for group in groups}
        return self.supports_decode_metadata_update and names <= EXTEND_BACKENDS

    def plan_first_pass(
        self,
        runner_cls: type[DraftGraphRunner],
        cudagraph_mode: CUDAGraphMode,
        width: int,
        counts: Sequence[int],
    ) -> DraftGraphRunner:
        """Plan graphs for `counts` requests of `width` rows of the target."""
        rows = width + 1
        runner = runner_cls(self.vllm_config, self.device, cudagraph_mode, rows)
        # Attention backends plan their workspaces for at most this many rows in a graph.
        most = runner.compilation_config.max_cudagraph_capture_size
        runner.plan_counts([count for count in counts if count * rows <= most])
        return runner

    def capture_extends(self, inputs: ExtendInputs, runner: DraftGraphRunner) -> None:
        """Capture the first pass at every size of `runner`; all requests have to be padding."""
        runner.capture_passes(
            functools.partial(self._prepare_extend, inputs), "Capturing draft extend CUDA graphs"
        )

    def _prepare_extend(self, inputs: ExtendInputs, num_reqs: int) -> Callable[[], None]:
        width = inputs.width + 1
        rows = num_reqs * width
        starts = self.arange_np[: num_reqs + 1] * width
        self.input_buffers.query_start_loc[: num_reqs + 1].copy_(torch.from_numpy(starts))
        self.input_buffers.seq_lens[:num_reqs].fill_(width)
        self.block_tables.get_dummy_block_tables(num_reqs)
        metadata = super()._build_attn_metadata(
            num_reqs=num_reqs,
            batch_desc=BatchExecutionDescriptor(CUDAGraphMode.FULL, rows, num_reqs, width),
            query_start_loc_np=starts,
            seq_lens_cpu_upper_bound=torch.full((num_reqs,), self.max_model_len),
            step=0,
            slot_mappings=self.expanded_slot_mappings[:, :rows],
        )
        return functools.partial(self._run_extend, inputs, num_reqs, metadata)

    def _run_extend(self, given: ExtendInputs, num_reqs: int, metadata: Metadata) -> None:
        inputs = given.rows(num_reqs)
        with self.metadata_of_capture(metadata):
            super()._prefill(
                inputs,
                inputs.num_rejected,
                inputs.last_sampled,
                num_reqs,
                skip_attn=False,
                num_tokens_across_dp=None,
            )

    @contextlib.contextmanager
    def metadata_of_capture(self, metadata: Metadata) -> Iterator[None]:
        """Have the pass within read this metadata, refreshed on the device, and build none."""
        self._captured_metadata = metadata
        try:
            yield
        finally:
            self._captured_metadata = None

    def _build_attn_metadata(self, num_reqs: int, *args: Any, **kwargs: Any) -> Metadata | None:
        metadata = self._captured_metadata
        if metadata is None:
            built: Metadata | None = super()._build_attn_metadata(num_reqs, *args, **kwargs)
            return built
        self._update_draft_decode_metadata(metadata, num_reqs)
        return metadata

    # --- a step ---------------------------------------------------------------------------------

    def _prefill(
        self, input_batch: InputBatch, num_rejected: torch.Tensor, last_sampled: torch.Tensor,
        num_reqs: int, skip_attn: bool, num_tokens_across_dp: torch.Tensor | None,
    ) -> None:  # fmt: skip
        launch = functools.partial(
            super()._prefill,
            input_batch, num_rejected, last_sampled, num_reqs, skip_attn, num_tokens_across_dp,
        )  # fmt: skip
        found = None if skip_attn else self._extend_graph_of(input_batch)
        if found is None:
            if not skip_attn:
                self.count_first_pass(replayed=False)
            launch()
            return
        inputs, runner, desc = found
        assert desc.num_reqs is not None
        inputs.load(input_batch, num_rejected, last_sampled)
        self.map_block_tables(num_reqs, desc.num_reqs)
        runner.replay(desc, launch, functools.partial(self.drafted_first, num_reqs))
        self.count_first_pass(replayed=True)

    def _extend_graph_of(
        self, batch: InputBatch
    ) -> tuple[ExtendInputs, DraftGraphRunner, BatchExecutionDescriptor] | None:
        found = self.first_pass_graphs(batch.num_tokens // max(1, batch.num_reqs))
        if found is None or not found[0].fits(batch):
            return None
        inputs, runner = found
        width = inputs.width + 1
        desc = runner.dispatch(batch.num_reqs, batch.num_reqs * width, width, num_active_loras=0)
        return (inputs, runner, desc) if desc.cg_mode == CUDAGraphMode.FULL else None

    def map_block_tables(self, num_reqs: int, num_padded: int) -> None:
        """Copy the block tables to where the graph reads them; padding reads the null block."""
        tables = self.block_tables.input_block_tables
        if num_padded > num_reqs:
            for table in tables:
                table[num_reqs:num_padded].zero_()
        for group in (group for groups in self.attn_groups for group in groups):
            group.map_to_kernel_block_table(tables[group.kv_cache_group_id])
