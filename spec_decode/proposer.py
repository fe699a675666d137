"""The EAGLE proposer that drafts a dynamic tree (EAGLE-2, Li et al. 2024, arXiv 2406.16858)."""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CUDAGraphMode, get_layers_from_vllm_config
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from vllm_graft import info, manager, model_state
from vllm_graft.config import GraftConfig
from vllm_graft.spec_decode.attention import DraftTreeMetadata, graft_attention
from vllm_graft.spec_decode.candidates import CandidateTable
from vllm_graft.spec_decode.context import TreeContext
from vllm_graft.spec_decode.head import DraftHead
from vllm_graft.spec_decode.kernels.attention import AttentionWorkspace
from vllm_graft.spec_decode.kernels.expand import expand_frontier, seed_frontier
from vllm_graft.spec_decode.kernels.finish import finish_tree
from vllm_graft.spec_decode.kernels.gather import path_index
from vllm_graft.spec_decode.model_state import TreeModelState

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.dp_utils import DPSyncState
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from vllm_graft.graph_runners.draft import DraftGraphRunner
    from vllm_graft.spec_decode.policy import TreePolicy


@dataclasses.dataclass
class DraftBuffers:
    """Static tensors of the draft's tree levels; R requests of K frontier rows each.

    Attributes:
        tokens: int32 ``[max_reqs * K]``, the frontier's tokens.
        parents: int64 ``[max_reqs * K]``, row of each frontier node's parent a level up.
        hidden: ``[max_reqs * K, hidden]``, draft states that the frontier continues from.
        prefix_lens: int32 ``[max_reqs]``, the draft's keys in the paged cache.
        scratch: K/V of the tree, one tensor a draft layer,
            ``[max_reqs, steps * K, num_kv_heads, 2 * head_size]``.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    hidden: torch.Tensor
    prefix_lens: torch.Tensor
    scratch: dict[str, torch.Tensor]


class TreeEagleSpeculator(EagleSpeculator):
    """Drafts a tree where vLLM's EAGLE speculator drafts a chain.

    The draft's extend pass, its graphs, the loading of the draft and the sharing of embeddings
    and output head are vLLM's own: the extend pass yields the first level instead of one token,
    and the levels below it run here, over a dense scratch K/V instead of paged look-ahead slots.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        graft = GraftConfig.from_vllm(vllm_config)
        assert graft is not None
        assert graft.eagle is not None
        self.config = graft.eagle
        policy: TreePolicy = manager.resolve(
            "graft_tree_policies", self.config.policy, "eagle", "policy"
        )
        self.graph_runner_cls: type[DraftGraphRunner] = manager.resolve(
            "graft_draft_graph_runners", self.config.graph_runner, "eagle", "graph_runner"
        )
        self.shape = policy(self.config, self.num_speculative_steps)
        self.tree_cudagraph_manager: DraftGraphRunner | None = None

    def load_model(self, target_model: nn.Module) -> None:
        """Load the draft, then graft the tree parts onto target and draft."""
        target = get_layers_from_vllm_config(self.vllm_config, Attention)
        super().load_model(target_model)
        self.head = DraftHead(self.model, self.shape.topk, self.config.hot_tokens)
        self._allocate(target)
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        for name, layer in layers.items():
            graft_attention(name, layer, self.context, is_draft=name in self.draft_attn_layer_names)
        model_state.compose(
            target_model, self.vllm_config, TreeModelState.bind(self.context, frozenset(target))
        )
        # Weakly: the report must not keep a stopped engine's memory alive.
        report = weakref.WeakMethod(self.report)
        info.publish("eagle", lambda: report()())

    def _allocate(self, target: dict[str, Attention]) -> None:
        shape, device = self.shape, self.device
        rows = self.max_num_reqs * shape.topk
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        draft = {name: layers[name] for name in self.draft_attn_layer_names}
        heads = max(layer.num_heads for layer in layers.values())
        head_size = max(layer.head_size for layer in layers.values())
        workspace = AttentionWorkspace.allocate(
            self.max_num_reqs,
            max(shape.num_nodes + 1, shape.topk),
            heads,
            head_size,
            max_splits=64,
            device=device,
        )
        self.context = TreeContext.allocate(
            shape, self.max_num_reqs, self.max_num_tokens, workspace, device
        )
        self.candidates = CandidateTable.allocate(
            self.max_num_reqs, shape.topk, shape.steps, device
        )
        self.path_rows = torch.zeros(self.max_num_tokens, dtype=torch.int64, device=device)
        self.buffers = DraftBuffers(
            # A compiled draft takes its inputs' dtypes for granted: those of vLLM's own pass.
            tokens=torch.zeros(rows, dtype=self.input_buffers.input_ids.dtype, device=device),
            parents=torch.zeros(rows, dtype=torch.int64, device=device),
            hidden=torch.zeros(rows, self.hidden_size, dtype=self.dtype, device=device),
            prefix_lens=torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device),
            scratch={
                name: torch.zeros(
                    self.max_num_reqs,
                    shape.steps * shape.topk,
                    layer.num_kv_heads,
                    2 * layer.head_size,
                    dtype=self.dtype,
                    device=device,
                )
                for name, layer in draft.items()
            },
        )

    def report(self) -> dict[str, Any]:
        """What `graft_info()` says of this part."""
        runner = self.tree_cudagraph_manager
        return {
            **dataclasses.asdict(self.shape),
            "draft_vocab": None if self.head.target_ids is None else len(self.head.target_ids),
            "draft_graphs": 0 if runner is None else len(runner.graphs),
            **dataclasses.asdict(self.context.counters),
        }

    # --- graphs ---------------------------------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Prepare the extend pass's graphs (vLLM's own) and those of the tree levels."""
        super().init_cudagraph_manager(cudagraph_mode)
        # The chain's decode loop does not run, so its graphs must not be captured.
        self.decode_cudagraph_manager = None
        self.tree_cudagraph_manager = self.graph_runner_cls(
            self.vllm_config, self.device, cudagraph_mode, self.shape.topk
        )

    def capture(self) -> None:
        """Capture the extend pass, then all tree levels as one graph a batch size."""
        steps, self.num_speculative_steps = self.num_speculative_steps, 1
        try:
            # With one step vLLM captures the extend pass alone.
            super().capture()
        finally:
            self.num_speculative_steps = steps
        assert self.tree_cudagraph_manager is not None
        self.idx_mapping.fill_(-1)
        self.buffers.prefix_lens.zero_()
        self.tree_cudagraph_manager.capture_levels(self._capture_levels)

    def _capture_levels(self, num_reqs: int) -> None:
        self._map_block_tables()
        self._draft_levels(num_reqs, self._metadata(num_reqs, self.max_model_len))

    # --- a step ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        *args: Any,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Draft a tree a request.

        Returns:
            Draft tokens int64 ``[num_reqs, num_nodes]`` in the order of their cumulative scores;
            the topology stays in the context's `TreeState`.
        """
        hidden = last_hidden_states
        if aux_hidden_states:
            hidden = self.model.combine_hidden_states(torch.cat(aux_hidden_states, -1))
        if not dummy_run:
            input_batch, hidden = self._follow_path(input_batch, hidden)
        super().propose(
            input_batch, attn_metadata, slot_mappings, hidden, None, num_sampled, num_rejected,
            *args, dummy_run=dummy_run, skip_attn_for_dummy_run=skip_attn_for_dummy_run,
            num_speculative_tokens=min(1, num_speculative_tokens or 1), **kwargs,
        )  # fmt: skip
        if num_speculative_tokens == 0:
            return self.draft_tokens[: input_batch.num_reqs].fill_(-1)
        self._grow(
            input_batch,
            num_rejected,
            skip_attn=dummy_run and skip_attn_for_dummy_run,
            need_eager=kwargs.get("is_profile", False),
            dp_sync_state=kwargs.get("dp_sync_state"),
        )
        return self.draft_tokens[: input_batch.num_reqs]

    def _follow_path(
        self, batch: InputBatch, hidden: torch.Tensor
    ) -> tuple[InputBatch, torch.Tensor]:
        """Bring the rows of accepted paths to the front, where a chain would have had them."""
        step = self.context.step
        if step is None or step.num_sampled is None:
            return batch, hidden
        num_tokens = batch.num_tokens_after_padding
        rows = self.path_rows[:num_tokens]
        path_index(
            self.context.path,
            step.num_sampled,
            batch.query_start_loc,
            step.num_drafts,
            rows,
            num_reqs=batch.num_reqs,
            num_tokens=num_tokens,
        )
        moved = dataclasses.replace(
            batch, input_ids=batch.input_ids[rows], positions=batch.positions[rows]
        )
        return moved, hidden[rows]

    def sample_draft(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Take the first level of the tree where the chain takes its first token.

        Args:
            hidden_states: ``[num_reqs, hidden]``, the extend pass's output at the last token.
            args: sampling state of the chain, not used: drafts are chosen, not sampled.
            kwargs: likewise.
        """
        logp, tokens = self.head.top(hidden_states)
        seed_frontier(
            self.candidates, logp, tokens, hidden_states.shape[0], next_tokens=self.buffers.tokens
        )
        return tokens[:, 0]

    def _grow(
        self,
        batch: InputBatch,
        num_rejected: torch.Tensor,
        *,
        skip_attn: bool,
        need_eager: bool,
        dp_sync_state: DPSyncState | None,
    ) -> None:
        """Run the levels below the first, by graph where one was captured."""
        num_reqs, topk = batch.num_reqs, self.shape.topk
        self.buffers.prefix_lens.zero_()
        torch.sub(batch.seq_lens[:num_reqs], num_rejected, out=self.buffers.prefix_lens[:num_reqs])
        self.context.counters.nodes_drafted += num_reqs * self.shape.num_candidates
        num_rows = num_reqs * topk
        if dp_sync_state is not None:
            dp_sync_state, num_rows = self._build_uniform_batch_dp_sync(
                dp_sync_state, num_reqs, num_query_per_req=topk
            )
        desc, sync = dispatch_cg_and_sync_dp(
            self.tree_cudagraph_manager,
            num_reqs,
            num_rows,
            uniform_token_count=topk,
            dp_size=self.dp_size,
            dp_rank=self.dp_rank,
            need_eager=need_eager,
            dp_sync_state=dp_sync_state,
        )
        if not skip_attn:
            self._map_block_tables()
        if desc.cg_mode == CUDAGraphMode.FULL:
            assert self.tree_cudagraph_manager is not None
            self.tree_cudagraph_manager.run_fullgraph(desc)
            return
        max_seq_len = int(batch.seq_lens_cpu_upper_bound[:num_reqs].max())
        self._draft_levels(
            num_reqs,
            None if skip_attn else self._metadata(num_reqs, max_seq_len),
            None if sync is None else sync.num_tokens_across_dp,
        )

    def _map_block_tables(self) -> None:
        """Refresh the draft groups' block tables, in the block size of their kernels."""
        self.draft_block_tables = {
            name: table
            for groups in self.attn_groups
            for group in groups
            for table in [
                group.map_to_kernel_block_table(
                    self.block_tables.input_block_tables[group.kv_cache_group_id]
                )
            ]
            for name in group.layer_names
        }

    def _metadata(self, num_reqs: int, max_seq_len: int) -> list[dict[str, DraftTreeMetadata]]:
        """Attention metadata of every level that runs, by layer name."""
        return [
            {
                name: DraftTreeMetadata(
                    level=level,
                    num_reqs=num_reqs,
                    prefix_lens=self.buffers.prefix_lens[:num_reqs],
                    block_table=self.draft_block_tables[name][:num_reqs],
                    ancestors=self.candidates.ancestors,
                    scratch=scratch,
                    max_seq_len=max_seq_len,
                )
                for name, scratch in self.buffers.scratch.items()
            }
            for level in range(self.shape.steps - 1)
        ]

    def _draft_levels(
        self,
        num_reqs: int,
        metadata: list[dict[str, DraftTreeMetadata]] | None,
        num_tokens_across_dp: torch.Tensor | None = None,
    ) -> None:
        """Grow the tree from its first level and keep its best nodes. Capturable.

        Args:
            num_reqs: requests, padding included; padding has request-state index -1.
            metadata: attention metadata a level, or None for a run without attention.
            num_tokens_across_dp: token counts of all data-parallel ranks.
        """
        shape, buffers = self.shape, self.buffers
        rows = num_reqs * shape.topk
        hidden = buffers.hidden[:rows]
        hidden.view(num_reqs, shape.topk, -1).copy_(self.hidden_states[:num_reqs, None])
        last_position = self.input_buffers.positions[:num_reqs]
        for level in range(shape.steps - 1):
            positions = (last_position + (level + 1)).clamp_(max=self.max_model_len - 1)
            output, feedback = self._run_level(
                rows,
                positions.repeat_interleave(shape.topk),
                None if metadata is None else metadata[level],
                num_tokens_across_dp,
            )
            logp, tokens = self.head.top(output)
            expand_frontier(
                self.candidates,
                level + 1,
                logp,
                tokens,
                num_reqs,
                next_tokens=buffers.tokens,
                parent_rows=buffers.parents,
            )
            # Through a copy: fused norms leave the draft's states in the buffer they came from.
            hidden.copy_(feedback[buffers.parents[:rows]])
        idx_mapping = self.idx_mapping[:num_reqs]
        finish_tree(
            self.candidates,
            num_reqs,
            shape.steps,
            shape.num_nodes,
            idx_mapping,
            self.context.is_chain[idx_mapping],
            self.context.tree,
            self.draft_tokens,
        )

    def _run_level(
        self,
        rows: int,
        positions: torch.Tensor,
        metadata: dict[str, DraftTreeMetadata] | None,
        num_tokens_across_dp: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the draft over the frontier; returns states for its head and for the next level."""
        tokens = self.buffers.tokens[:rows]
        embeds = self.model.embed_input_ids(tokens) if self.supports_mm_inputs else None
        self._prepare_eplb_forward(rows)
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=rows,
            num_tokens_across_dp=num_tokens_across_dp,
            # No slots: the tree's K/V goes to the scratch, the paged cache is only read.
            slot_mapping={},
            batch_descriptor=BatchDescriptor(num_tokens=rows),
        ):
            states = self.model(
                input_ids=tokens,
                positions=positions,
                hidden_states=self.buffers.hidden[:rows],
                inputs_embeds=embeds,
            )
        return states if isinstance(states, tuple) else (states, states)
