"""The chain of a standalone draft model (``method: draft_model``), its loop as CUDA graphs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, prepare_inputs_to_capture
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from vllm_graft import info, manager
from vllm_graft.config import GraftConfig, flag
from vllm_graft.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from vllm_graft.graph_runners.draft import DraftGraphRunner

Metadata = dict[str, Any]


@dataclass
class ChainInputs:
    """What the loop reads of a step's batch, at fixed addresses: its stand-in for `InputBatch`.

    Attributes:
        seq_lens: int32 ``[max_reqs]``, tokens of each request without its rejected drafts; 0 in
            padding.
        num_rejected: int32 ``[max_reqs]``, zeros: they are subtracted already.
        idx_mapping: int64 ``[max_reqs]``, the speculator's own; -1 in padding.
        seq_lens_cpu_upper_bound: not read, as attention metadata was made at capture.
    """

    seq_lens: torch.Tensor
    num_rejected: torch.Tensor
    idx_mapping: torch.Tensor
    seq_lens_cpu_upper_bound: None = None

    @classmethod
    def allocate(cls, idx_mapping: torch.Tensor) -> ChainInputs:
        """Buffers for as many requests as `idx_mapping` has."""
        zeros = torch.zeros(idx_mapping.shape[0], dtype=torch.int32, device=idx_mapping.device)
        return cls(zeros, zeros.clone(), idx_mapping)

    def load(self, seq_lens: torch.Tensor, num_rejected: torch.Tensor, num_reqs: int) -> None:
        """Take in a step's numbers, ``[>= num_reqs]`` each; the rest becomes padding."""
        rows = slice(0, num_reqs)
        torch.sub(seq_lens[rows], num_rejected[rows], out=self.seq_lens[rows])
        self.seq_lens[num_reqs:].zero_()

    def rows(self, num_reqs: int) -> ChainInputs:
        """Views of the first requests."""
        return ChainInputs(
            self.seq_lens[:num_reqs], self.num_rejected[:num_reqs], self.idx_mapping[:num_reqs]
        )


@dataclass
class ChainCounters:
    """Loops by how they ran.

    Attributes:
        replays: as a graph.
        padding_rows: rows of these that belonged to no request.
        too_large: launched step by step, as the batch exceeds the largest graph.
        uncaptured: likewise, as there are no graphs: profiling, warm-up, the eager runner.
    """

    replays: int = 0
    padding_rows: int = 0
    too_large: int = 0
    uncaptured: int = 0


class ChainSpeculator(StandaloneARSpeculator):
    """Runs vLLM's loop over a standalone draft model as one CUDA graph a batch size.

    The loop stays vLLM's, in graphs too: a capture records `_multi_step_decode` itself, over
    static stand-ins for its arguments and with attention metadata that the device refreshes each
    step. A batch that no graph fits goes to the very same function.
    """

    chain_runner: DraftGraphRunner | None
    """An attribute: so vLLM's memory profiling finds, measures and drops it, by its class."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        graft = GraftConfig.from_vllm(vllm_config)
        assert graft is not None
        assert graft.draft is not None
        self.config = graft.draft
        self.graph_runner_cls: type[DraftGraphRunner] = manager.resolve(
            "graft_draft_graph_runners", self.config.graph_runner, "draft", "graph_runner"
        )
        self.chain_runner = None
        self.chain_inputs = ChainInputs.allocate(self.idx_mapping)
        self.counters = ChainCounters()
        self._captured_metadata: Metadata | None = None

    def load_model(self, target_model: nn.Module) -> None:
        """Load the draft as vLLM does, and report from now on."""
        super().load_model(target_model)
        info.publish("draft", info.weak(self.report))

    def report(self) -> dict[str, Any]:
        """What `graft_info()` says of this part."""
        return {
            "steps": self.num_speculative_steps,
            "graphs": [desc.num_reqs for desc in self.chain_graphs()],
            **dataclasses.asdict(self.counters),
        }

    # --- graphs ---------------------------------------------------------------------------------

    def chain_graphs(self) -> dict[BatchExecutionDescriptor, Any]:
        """Every captured graph, by the batch that it was captured for."""
        return {} if self.chain_runner is None else self.chain_runner.graphs

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Plan the graphs of the loop.

        Raises:
            ConfigError: there would be none, or the draft's attention can't be captured.
        """
        head = f"{flag('draft')} asks for CUDA graphs of the draft's loop, but"
        if cudagraph_mode.decode_mode() != CUDAGraphMode.FULL:
            raise ConfigError(
                f"{head} compilation_config.cudagraph_mode came out as {cudagraph_mode.name} for "
                "this model and its attention backend, and captures no decode as a whole: set it "
                "to FULL_AND_PIECEWISE or FULL_DECODE_ONLY, choose another --attention-backend, "
                f"or drop {flag('draft')}"
            )
        if not self.supports_decode_metadata_update:
            names = {group.backend.get_name() for groups in self.attn_groups for group in groups}
            raise ConfigError(
                f"{head} the draft's attention ({', '.join(sorted(names))}) plans each step on the "
                "host: set --attention-backend to FLASH_ATTN or TRITON_ATTN, or drop "
                f"{flag('draft')}"
            )
        runner = self.graph_runner_cls(self.vllm_config, self.device, cudagraph_mode, 1)
        sizes = runner.compilation_config.cudagraph_capture_sizes
        if runner.cudagraph_mode and not runner.needs_capture():
            raise ConfigError(
                f"{head} no size in compilation_config.cudagraph_capture_sizes {sizes} is at most "
                f"--max-num-seqs {self.max_num_reqs}: add sizes from 1 to {self.max_num_reqs}, or "
                f"drop {flag('draft')}"
            )
        # An engine that captures nothing of the target's does not ask the speculator either.
        width = self.num_speculative_steps + 1
        target = CudaGraphManager(self.vllm_config, self.device, cudagraph_mode, width)
        if not target.needs_capture():
            raise ConfigError(
                f"{head} compilation_config.cudagraph_capture_sizes {sizes} holds no batch of the "
                f"target, {width} rows a request, so that the engine captures nothing at all: add "
                f"multiples of {width}, or drop {flag('draft')}"
            )
        self.chain_runner = runner

    def capture(self) -> None:
        """Capture the loop, one graph a planned size."""
        assert self.chain_runner is not None
        # As padding: the captured run writes no K/V and samples for nobody.
        self.idx_mapping.fill_(-1)
        self.last_token_indices.zero_()
        self.chain_inputs.seq_lens.zero_()
        self.chain_runner.capture_passes(self._prepare, "Capturing draft chain CUDA graphs")

    def _prepare(self, num_reqs: int) -> Callable[[], None]:
        """Make a size's attention metadata; returns what is captured."""
        metadata, _ = prepare_inputs_to_capture(
            num_reqs,
            num_reqs,
            self.model_state,
            self.input_buffers,
            self.block_tables,
            self.attn_groups,
            self.kv_cache_config,
            full_cudagraph=True,
            max_query_len=1,
        )
        return functools.partial(self._run_captured, num_reqs, metadata)

    def _run_captured(self, num_reqs: int, metadata: Metadata) -> None:
        inputs = self.chain_inputs.rows(num_reqs)
        with self._metadata_of_capture(metadata):
            super()._multi_step_decode(
                inputs, inputs.num_rejected, num_reqs, skip_attn=False, num_tokens_across_dp=None
            )

    @contextlib.contextmanager
    def _metadata_of_capture(self, metadata: Metadata) -> Iterator[None]:
        self._captured_metadata = metadata
        try:
            yield
        finally:
            self._captured_metadata = None

    def _build_uniform_attn_metadata(
        self, batch_desc: BatchExecutionDescriptor, num_reqs: int, *args: Any, **kwargs: Any
    ) -> Metadata | None:
        """In a capture the metadata is there: the device brings it up to date with its lengths."""
        metadata = self._captured_metadata
        if metadata is None:
            built: Metadata | None = super()._build_uniform_attn_metadata(
                batch_desc, num_reqs, *args, **kwargs
            )
            return built
        self._update_draft_decode_metadata(metadata, num_reqs)
        return metadata

    # --- a step ---------------------------------------------------------------------------------

    def _multi_step_decode(
        self,
        input_batch: InputBatch,
        num_rejected: torch.Tensor,
        num_reqs: int,
        skip_attn: bool,
        num_tokens_across_dp: torch.Tensor | None,
    ) -> None:
        """Draft tokens 2 to k of every request, by graph where one was captured."""
        desc = None if skip_attn else self._graph_of(num_reqs)
        if desc is None:
            super()._multi_step_decode(
                input_batch, num_rejected, num_reqs, skip_attn, num_tokens_across_dp
            )
            return
        assert self.chain_runner is not None
        assert desc.num_reqs is not None
        self.chain_inputs.load(input_batch.seq_lens, num_rejected, num_reqs)
        self._map_block_tables(num_reqs, desc.num_reqs)
        self.chain_runner.run_fullgraph(desc)
        self.counters.replays += 1
        self.counters.padding_rows += desc.num_reqs - num_reqs

    def _graph_of(self, num_reqs: int) -> BatchExecutionDescriptor | None:
        """The smallest graph for a batch; None, and counted, if it has to be launched."""
        if self.chain_runner is None or not self.chain_runner.graphs:
            self.counters.uncaptured += 1
            return None
        desc = self.chain_runner.dispatch(num_reqs, num_reqs, 1, num_active_loras=0)
        if desc.cg_mode == CUDAGraphMode.FULL:
            return desc
        self.counters.too_large += 1
        return None

    def _map_block_tables(self, num_reqs: int, num_padded: int) -> None:
        """Bring the block tables to where the graph reads them; padding reads the null block."""
        tables = self.block_tables.input_block_tables
        if num_padded > num_reqs:
            for table in tables:
                table[num_reqs:num_padded].zero_()
        for group in (group for groups in self.attn_groups for group in groups):
            group.map_to_kernel_block_table(tables[group.kv_cache_group_id])
