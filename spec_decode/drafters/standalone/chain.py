"""The chain of a standalone draft model (``method: draft_model``) as CUDA graphs."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    prepare_inputs_to_capture,
)
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_graft.base import info
from vllm_graft.base.decision import decline_or_raise
from vllm_graft.base.errors import ConfigError
from vllm_graft.base.metric import Numbers
from vllm_graft.base.options import flag
from vllm_graft.graph_runners.language.draft import DraftGraphRunner
from vllm_graft.hooks import manager
from vllm_graft.spec_decode.config.draft_config import DraftConfig
from vllm_graft.spec_decode.drafters.standalone.first_pass import (
    ExtendInputs,
    FirstPassGraphs,
    Metadata,
)


@dataclass
class ChainInputs:
    """The captured loop's stand-in for `InputBatch`; `idx_mapping` is the speculator's own.
    `seq_lens`: int32 ``[max_reqs]``, without rejected drafts; 0 in padding. `num_rejected`: zeros:
    `seq_lens` excludes rejected drafts already. `seq_lens_cpu_upper_bound`: not read, as attention
    metadata was made at capture."""

    seq_lens: torch.Tensor
    num_rejected: torch.Tensor
    idx_mapping: torch.Tensor
    seq_lens_cpu_upper_bound: None = None

    @classmethod
    def allocate(cls, idx_mapping: torch.Tensor) -> Self:
        zeros = torch.zeros(idx_mapping.shape[0], dtype=torch.int32, device=idx_mapping.device)
        return cls(zeros, zeros.clone(), idx_mapping)

    def load(self, seq_lens: torch.Tensor, num_rejected: torch.Tensor, num_reqs: int) -> None:
        """Copy a step's lengths, ``[>= num_reqs]`` each; the rest becomes padding."""
        rows = slice(0, num_reqs)
        torch.sub(seq_lens[rows], num_rejected[rows], out=self.seq_lens[rows])
        self.seq_lens[num_reqs:].zero_()

    def rows(self, num_reqs: int) -> "ChainInputs":
        return ChainInputs(
            self.seq_lens[:num_reqs], self.num_rejected[:num_reqs], self.idx_mapping[:num_reqs]
        )


@dataclass
class ChainCounters:
    """How often first passes and loops ran as graphs or as launches.

    Attributes:
        padding_rows: padding requests in the replays of loops.
        too_large: loops launched step by step because the batch exceeds the largest graph.
        uncaptured: loops launched without graphs: in profiling and warm-up, or by the eager runner.
        extend_launched: first passes that no graph fits, most often with prompts in the batch.
    """

    replays: int = 0
    extend_replays: int = 0
    padding_rows: int = 0
    too_large: int = 0
    uncaptured: int = 0
    extend_launched: int = 0


class ChainSpeculator(FirstPassGraphs):
    """Runs vLLM's passes over a standalone draft model as CUDA graphs, one per batch size. The
    passes stay vLLM's, in graphs too: a capture records `_prefill` (the first) and
    `_multi_step_decode` (the loop over the others) themselves, over static stand-ins for their
    arguments. A batch that no graph fits goes to the very same functions."""

    chain_runner: DraftGraphRunner | None
    extend_runner: DraftGraphRunner | None
    """Both are plain attributes because vLLM's memory profiling looks through a speculator's
    attributes for managers of graphs, which it measures and drops."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        config = DraftConfig.from_vllm(vllm_config)
        assert config is not None
        self.config = config
        self.graph_runner_cls: type[DraftGraphRunner] = manager.resolve(
            "graft_draft_graph_runners", self.config.graph_runner, "draft", "graph_runner"
        )
        self.chain_runner = self.extend_runner = None
        self.chain_inputs = ChainInputs.allocate(self.idx_mapping)
        self.extend_inputs = ExtendInputs.allocate(self.idx_mapping, self.num_speculative_steps + 1)
        self.counters = ChainCounters()

    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        info.publish("draft", info.weakly(self.report), info.weakly(self.numbers))

    def report(self) -> dict[str, Any]:
        return {
            "steps": self.num_speculative_steps,
            "graphs": _sizes(self.chain_runner),
            "extend_graphs": _sizes(self.extend_runner),
            **dataclasses.asdict(self.counters),
            **_checks("graphs", self.chain_runner),
            **_checks("extend_graphs", self.extend_runner),
        }

    def numbers(self) -> Numbers:
        counted = self.counters
        return {
            "loop_replays": counted.replays,
            "loop_launches": {"uncaptured": counted.uncaptured, "no_fit": counted.too_large},
            "first_pass_replays": counted.extend_replays,
            "first_pass_launches": counted.extend_launched,
            "padding_requests": counted.padding_rows,
            "graphs": {
                "first_pass": len(_sizes(self.extend_runner)),
                "loop": len(_sizes(self.chain_runner)),
            },
        }

    # --- graphs ---------------------------------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Plan the graphs. Raises `ConfigError` if there would be none, or the draft's attention
        can't be captured. If a preset turned the part on, the passes are launched, as vLLM does."""
        try:
            self._plan_graphs(cudagraph_mode)
        except ConfigError as refused:
            decline_or_raise("draft", refused, self.vllm_config)
            self.chain_runner = self.extend_runner = None

    def _plan_graphs(self, cudagraph_mode: CUDAGraphMode) -> None:
        names = {group.backend.get_name() for groups in self.attn_groups for group in groups}
        self._require_capturable(cudagraph_mode, sorted(names))
        self.chain_runner = self._plan_loop(cudagraph_mode)
        self.extend_runner = None
        if self.config.extend and self.refreshes_first_pass:
            counts = self.chain_runner.planned_counts()
            self.extend_runner = self.plan_first_pass(
                self.graph_runner_cls, cudagraph_mode, self.extend_inputs.width, counts
            )

    def _require_capturable(self, cudagraph_mode: CUDAGraphMode, backends: list[str]) -> None:
        if cudagraph_mode.decode_mode() != CUDAGraphMode.FULL:
            raise _not_without(
                f"compilation_config.cudagraph_mode came out as {cudagraph_mode.name} for this "
                "model and its attention backend, and captures no decode as a whole: set it to "
                "FULL_AND_PIECEWISE or FULL_DECODE_ONLY, choose another --attention-backend"
            )
        if not self.supports_decode_metadata_update:
            raise _not_without(
                f"the draft's attention ({', '.join(backends)}) plans each step on the host: set "
                "--attention-backend to FLASH_ATTN or TRITON_ATTN"
            )

    def _plan_loop(self, cudagraph_mode: CUDAGraphMode) -> DraftGraphRunner:
        runner = self.graph_runner_cls(self.vllm_config, self.device, cudagraph_mode, 1)
        found = (
            "compilation_config.cudagraph_capture_sizes "
            f"{runner.compilation_config.cudagraph_capture_sizes}"
        )
        if runner.cudagraph_mode and not runner.needs_capture():
            raise _not_without(
                f"no size in {found} is at most --max-num-seqs {self.max_num_reqs}: add sizes from "
                f"1 to {self.max_num_reqs}"
            )
        # An engine that captures no graph of the target does not ask the speculator for graphs.
        width = self.num_speculative_steps + 1
        target = CudaGraphManager(self.vllm_config, self.device, cudagraph_mode, width)
        if not target.needs_capture():
            raise _not_without(
                f"{found} holds no batch of the target, {width} rows per request, so that the "
                f"engine captures nothing at all: add multiples of {width}"
            )
        return runner

    def capture(self) -> None:
        if self.chain_runner is None:
            return
        # All requests are padding: the captured run writes no K/V and samples for none of them.
        self.idx_mapping.fill_(-1)
        self.last_token_indices.zero_()
        self.chain_inputs.seq_lens.zero_()
        if self.extend_runner is not None:
            self.capture_extends(self.extend_inputs, self.extend_runner)
        self.chain_runner.capture_passes(self._prepare_loop, "Capturing draft chain CUDA graphs")

    def _prepare_loop(self, num_reqs: int) -> Callable[[], None]:
        metadata, _ = prepare_inputs_to_capture(
            num_reqs, num_reqs, self.model_state, self.input_buffers, self.block_tables,
            self.attn_groups, self.kv_cache_config, full_cudagraph=True, max_query_len=1,
        )  # fmt: skip
        return functools.partial(self._run_loop, num_reqs, metadata)

    def _run_loop(self, num_reqs: int, metadata: Metadata) -> None:
        inputs = self.chain_inputs.rows(num_reqs)
        with self.metadata_of_capture(metadata):
            super()._multi_step_decode(
                inputs, inputs.num_rejected, num_reqs, skip_attn=False, num_tokens_across_dp=None
            )

    # --- a step ---------------------------------------------------------------------------------

    def first_pass_graphs(self, width: int) -> tuple[ExtendInputs, DraftGraphRunner] | None:
        if self.extend_runner is None or width != self.extend_inputs.width:
            return None
        return self.extend_inputs, self.extend_runner

    def drafted_first(self, num_reqs: int) -> list[torch.Tensor]:
        return [self.draft_tokens[:num_reqs, :1].clone()]

    def count_first_pass(self, *, replayed: bool) -> None:
        self.counters.extend_replays += replayed
        self.counters.extend_launched += not replayed

    def _multi_step_decode(
        self,
        input_batch: InputBatch,
        num_rejected: torch.Tensor,
        num_reqs: int,
        skip_attn: bool,
        num_tokens_across_dp: torch.Tensor | None,
    ) -> None:
        """Draft tokens 2 to k of every request, by a graph if one fits."""
        desc = None if skip_attn else self._graph_of(num_reqs)
        if desc is None:
            super()._multi_step_decode(
                input_batch, num_rejected, num_reqs, skip_attn, num_tokens_across_dp
            )
            return
        assert self.chain_runner is not None
        assert desc.num_reqs is not None
        self.chain_inputs.load(input_batch.seq_lens, num_rejected, num_reqs)
        self.map_block_tables(num_reqs, desc.num_reqs)
        self.chain_runner.replay(
            desc,
            functools.partial(
                super()._multi_step_decode,
                input_batch, num_rejected, num_reqs, skip_attn, num_tokens_across_dp,
            ), lambda: [self.draft_tokens[:num_reqs, 1:].clone()],
        )  # fmt: skip
        self.counters.replays += 1
        self.counters.padding_rows += desc.num_reqs - num_reqs

    def _graph_of(self, num_reqs: int) -> BatchExecutionDescriptor | None:
        if self.chain_runner is None or not self.chain_runner.graphs:
            self.counters.uncaptured += 1
            return None
        desc = self.chain_runner.dispatch(num_reqs, num_reqs, 1, num_active_loras=0)
        if desc.cg_mode == CUDAGraphMode.FULL:
            return desc
        self.counters.too_large += 1
        return None


def _not_without(reason_and_remedy: str) -> ConfigError:
    part = flag("draft")
    return ConfigError(
        f"{part} asks for CUDA graphs of the draft's loop, but {reason_and_remedy}, or drop {part}"
    )


def _sizes(runner: DraftGraphRunner | None) -> list[int]:
    return [desc.num_reqs or 0 for desc in runner.graphs] if runner is not None else []


def _checks(name: str, runner: DraftGraphRunner | None) -> dict[str, list[int]]:
    checks = runner.checks() if runner is not None else {}
    return {f"{name}_{outcome}": sizes for outcome, sizes in checks.items()}
