"""Trees of a standalone draft model (``method: draft_model``), which has K/V of its own."""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_graft.graph_runners.language.draft import DraftGraphRunner
from vllm_graft.spec_decode.drafters.levels import (
    LevelGrowth,
    LevelMemory,
    frontier_context,
    growths_by_levels,
)
from vllm_graft.spec_decode.drafters.standalone.first_pass import ExtendInputs, FirstPassGraphs
from vllm_graft.spec_decode.drafters.tree_drafting import TreeDrafting
from vllm_graft.spec_decode.kernels.topk import Noise
from vllm_graft.spec_decode.trees.tree import TreeShape
from vllm_graft.spec_decode.tuning.scheduling import graph_counts, widths
from vllm_graft.spec_decode.verification.context import AcceptedRows


class StandaloneGrowth(LevelGrowth):
    """A `LevelGrowth` whose draft has read one token more than the target: the last one drawn."""

    def __init__(
        self, shape: TreeShape, memory: LevelMemory, token_dtype: torch.dtype, max_len: int
    ) -> None:
        super().__init__(shape, memory, token_dtype)
        self._max_len = max_len

    def set_prefix(self, seq_lens: torch.Tensor, num_rejected: torch.Tensor) -> None:
        super().set_prefix(seq_lens, num_rejected)
        self.prefix_lens[: num_rejected.shape[0]].add_(1).clamp_(max=self._max_len)


@dataclass
class FirstPassCounters:
    """How first passes ran: as a graph, or as launches, most often beside prompts."""

    first_pass_replays: int = 0
    first_pass_launches: int = 0


class DraftModelTrees(TreeDrafting, FirstPassGraphs):
    """What vLLM builds in the place of `StandaloneARSpeculator`. The first pass is vLLM's own: it
    runs the draft over the tokens that were accepted and the one that was drawn behind them. Levels
    are drafted from the last of them on as EAGLE's, without states of the target."""

    seams = ("draft",)

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.first_inputs: dict[int, ExtendInputs] = {}
        self.first_counters = FirstPassCounters()

    @functools.cached_property
    def _no_states(self) -> torch.Tensor:
        """Nothing, where drafts of other kinds have the target's states."""
        return torch.zeros(self.max_num_tokens, 1, device=self.device)

    def make_growths(
        self, shapes: Collection[TreeShape], layers: Mapping[str, AttentionLayerBase]
    ) -> Mapping[TreeShape, StandaloneGrowth]:
        self.accepted = AcceptedRows(self.input_buffers, torch.zeros_like(self._no_states))
        self.memory = LevelMemory(
            shapes,
            layers,
            max_reqs=self.max_num_reqs,
            dtype=self.draft_model_config.dtype,
            device=self.device,
            extra=self.extra_columns,
        )
        token_dtype = self.expanded_input_ids.dtype
        return growths_by_levels(
            shapes,
            lambda shape: StandaloneGrowth(shape, self.memory, token_dtype, self.max_model_len),
        )

    # --- graphs -----------------------------------------------------------------------------------

    def plan_growth_graphs(self, cudagraph_mode: CUDAGraphMode) -> None:
        super().plan_growth_graphs(cudagraph_mode)
        if cudagraph_mode.decode_mode() != CUDAGraphMode.FULL or not self.refreshes_first_pass:
            return
        auto = self.config.shape == "auto"
        counts = graph_counts(self.trees.engine_config) if auto else {}
        runners = (self.runner(plan) for plan in self.trees.all_plans)
        grown = {count for runner in runners if runner for count in runner.planned_counts()}
        for width in sorted(widths(self.trees.engine_config, auto=auto)):
            self.first_inputs[width] = ExtendInputs.allocate(self.idx_mapping, width)
            wanted = counts.get(width, []) if auto else sorted(grown)
            runner = self.plan_first_pass(
                self.trees.graph_runner_cls, cudagraph_mode, width, wanted
            )
            # vLLM's memory profiling looks through attributes: see `plan_graphs`.
            setattr(self, _runner_name(width), runner)

    def capture_first_pass(self) -> None:
        # All requests are padding: the captured run writes no K/V.
        self.idx_mapping.fill_(-1)
        self.last_token_indices.zero_()
        for width in self.first_inputs:
            if found := self.first_pass_graphs(width):
                self.capture_extends(*found)

    def first_pass_graphs(self, width: int) -> tuple[ExtendInputs, DraftGraphRunner] | None:
        runner: DraftGraphRunner | None = getattr(self, _runner_name(width), None)
        return None if runner is None else (self.first_inputs[width], runner)

    def first_pass_graph(self, width: int) -> tuple[CudaGraphManager | None, int]:
        """Graphs of a first pass, whose requests have a row more than the target's."""
        found = self.first_pass_graphs(width)
        return found[1] if found else None, width + 1

    def drafted_first(self, num_reqs: int) -> list[torch.Tensor]:
        assert self.trees.roots.states is not None
        return [self.trees.roots.states[:num_reqs].clone()]

    def count_first_pass(self, *, replayed: bool) -> None:
        self.first_counters.first_pass_replays += replayed
        self.first_counters.first_pass_launches += not replayed

    def report(self) -> dict[str, Any]:
        found = {width: self.first_pass_graphs(width) for width in self.first_inputs}
        runners = {width: each[1] for width, each in found.items() if each}
        checks = {width: runner.checks() for width, runner in runners.items()}
        return {
            **super().report(),
            "first_pass_graphs": {
                width: sorted(desc.num_reqs or 0 for desc in runner.graphs)
                for width, runner in runners.items()
            },
            **{
                f"first_pass_graphs_{outcome}": {width: checks[width][outcome] for width in checks}
                for outcome in ("verified", "differing")
                if all(outcome in each for each in checks.values())
            },
            **dataclasses.asdict(self.first_counters),
        }

    # --- a step -----------------------------------------------------------------------------------

    def first_pass(
        self, input_batch: InputBatch, attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor], last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None, num_sampled: torch.Tensor,
        num_rejected: torch.Tensor, *args: Any, dummy_run: bool, samples: bool, **kwargs: Any,
    ) -> InputBatch:  # fmt: skip
        """Run vLLM's first pass over the accepted rows; the draft needs it without drafts, too."""
        if not dummy_run:
            states = self._no_states[: input_batch.num_tokens_after_padding]
            input_batch, _ = self.accepted.move(
                self.context, input_batch, states, self.max_num_reqs
            )
        # TreeDrafting.propose has called this method; this is vLLM's own propose behind it.
        super(TreeDrafting, self).propose(
            input_batch, attn_metadata, slot_mappings, last_hidden_states, None, num_sampled,
            num_rejected, *args, dummy_run=dummy_run, **kwargs,
        )  # fmt: skip
        if dummy_run:
            # Dummy batches have the request-state indices of real ones, whose trees must stay.
            self.idx_mapping.fill_(-1)
        return input_batch

    def _multi_step_decode(
        self,
        input_batch: InputBatch,
        num_rejected: torch.Tensor,
        num_reqs: int,
        skip_attn: bool,
        num_tokens_across_dp: torch.Tensor | None,
    ) -> None:
        """Note where the levels begin, in the place of a chain's later steps."""
        rows = input_batch.positions if skip_attn else self.expanded_positions
        last = rows[self.last_token_indices[:num_reqs]]
        self.input_buffers.positions[:num_reqs].copy_(last)

    def noise(
        self, num_reqs: int, positions: torch.Tensor, *, rows: int, offset: int
    ) -> Noise | None:
        """Offset 0: a row has its own token's position, which keys the draw of the next token."""
        return super().noise(num_reqs, positions, rows=rows, offset=0)

    @property
    def last_states(self) -> torch.Tensor:
        """``[max_reqs, 1]``, nothing: the draft goes on from its own K/V."""
        return self._no_states[: self.max_num_reqs]

    def run_frontier(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor,
        metadata: Any,
        num_tokens_across_dp: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = positions.shape[0]
        with frontier_context(self.vllm_config, rows, metadata, num_tokens_across_dp):
            output = self.model(input_ids=tokens, positions=positions)
        return (output[0] if isinstance(output, tuple) else output), states


def _runner_name(width: int) -> str:
    return f"first_pass_{width}_cudagraph_manager"
