"""What the tree parts of one worker share: topology, row masks, the accepted path, scratch K/V."""

from __future__ import annotations

import copy
import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_graft.spec_decode.kernels.rows import prepare_rows
from vllm_graft.spec_decode.trees.topology import TreeState
from vllm_graft.spec_decode.trees.tree_rows import TreeRows

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from vllm_graft.spec_decode.kernels.attention.tree_attention import AttentionWorkspace
    from vllm_graft.spec_decode.trees.shape import TreeShape


class VerifyMode(enum.Enum):
    """Which requests of the coming forward pass need the ancestor mask."""

    NONE = enum.auto()
    """No request carries drafts: the platform's attention does it all."""
    MIXED = enum.auto()
    """Some do: the platform's attention runs, then the tree rows are computed over it."""
    ALL = enum.auto()
    """Every request does (so in a FULL CUDA graph of decodes): tree attention alone runs."""


@dataclass
class VerifyStep:
    """One target pass over drafts, from its preparation to the draft's extend pass.

    Attributes:
        batch: the engine's batch.
        num_drafts: int32 ``[num_reqs]``, drafted nodes verified a request.
        depth_shift: int64 ``[num_tokens_padded]``, what the tree added to each row's linear
            position; only for targets with multi-dimensional positions.
        num_sampled: int32 ``[num_reqs]``, length of the accepted path; None before verification.
    """

    batch: InputBatch
    num_drafts: torch.Tensor
    depth_shift: torch.Tensor | None = None
    num_sampled: torch.Tensor | None = None


@dataclass
class Counters:
    """Host-side counts since the start; they cost no device work."""

    verify_steps: int = 0
    nodes_verified: int = 0
    nodes_drafted: int = 0
    chain_requests: int = 0
    mixed_replays: int = 0
    """Steps with prompts beside trees that ran as one graph."""
    mixed_launches: int = 0
    """Such steps that did not: no graph holds as many rows, or there are none."""


@dataclass
class TreeContext:
    """Persistent tensors of the tree part; addresses are stable, so CUDA graphs may bake them in.

    Attributes:
        shape: bounds of the trees.
        tree: topology of the drafted tree by request-state index.
        is_chain: bool ``[max_reqs]`` by request-state index, requests that need a linear history.
        by_temperature: bool ``[max_reqs]`` by request-state index, on the host: requests whose
            logits nothing but temperature changes.
        rows: rows of trees in the batch.
        path: int32 ``[max_reqs, num_nodes + 1]``, accepted nodes a request of the batch.
        workspace: partial results of the tree attention kernels.
        emitted: int32 ``[vocab]``, counts what requests emit; None where nobody asks.
        mode: which requests of the coming pass the tree kernel serves.
        step: the pass under way.
        counters: host-side counts.
    """

    shape: TreeShape
    tree: TreeState
    is_chain: torch.Tensor
    by_temperature: np.ndarray
    rows: TreeRows
    path: torch.Tensor
    workspace: AttentionWorkspace
    emitted: torch.Tensor | None = None
    mode: VerifyMode = VerifyMode.NONE
    step: VerifyStep | None = None
    counters: Counters = field(default_factory=Counters)
    _plain: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    @classmethod
    def allocate(
        cls,
        shape: TreeShape,
        max_reqs: int,
        max_tokens: int,
        workspace: AttentionWorkspace,
        device: torch.device,
    ) -> TreeContext:
        """Allocate for at most `max_reqs` requests and `max_tokens` token rows a batch."""
        width = shape.num_nodes + 1
        return cls(
            shape=shape,
            tree=TreeState.allocate(max_reqs, shape.num_nodes, device),
            is_chain=torch.zeros(max_reqs, dtype=torch.bool, device=device),
            by_temperature=np.zeros(max_reqs, dtype=bool),
            rows=TreeRows.allocate(max_reqs, max_tokens, device),
            path=torch.zeros(max_reqs, width, dtype=torch.int32, device=device),
            workspace=workspace,
        )

    def begin(
        self, batch: InputBatch, num_computed: torch.Tensor, *, keep_shift: bool = False
    ) -> VerifyStep:
        """Put the drafts' depths into the batch's positions and their ancestors into the masks.

        Args:
            batch: a real batch whose slot mapping is computed already: node i must keep the slot
                of the i-th new token whatever its depth.
            num_computed: int32 ``[max_reqs]`` by request-state index.
            keep_shift: keep what changed in the positions as the step's `depth_shift`.
        """
        no_drafts = batch.num_draft_tokens == 0
        linear = batch.positions.clone() if keep_shift else None
        prepare_rows(
            self.tree,
            batch,
            num_computed,
            self.rows,
            # A FULL graph of one-token queries (vLLM's number of drafts by batch size may be 0)
            # holds the tree kernel alone, which then has to serve requests without drafts.
            plain_rows=no_drafts,
            max_rows=self.tree.width,
        )
        drafts = self.rows.num_drafts[: batch.num_reqs]
        self.step = VerifyStep(batch, drafts, None if linear is None else batch.positions - linear)
        if not no_drafts:
            self.counters.verify_steps += 1
        self.counters.nodes_verified += batch.num_draft_tokens
        return self.step

    def choose_mode(self, batch: InputBatch, for_capture: bool, *, is_graph: bool = False) -> None:
        """Decide on the host how the coming pass computes attention.

        Args:
            batch: the engine's.
            for_capture: whether the pass is captured, or is a dummy's.
            is_graph: whether it is a replay of a whole pass.
        """
        self._plain.clear()
        drafts = batch.num_draft_tokens_per_req
        if for_capture:
            # vLLM's warm-up has left its batch here; a graph of narrower queries has no such rows.
            self.rows.clear()
            # A graph of mixed batches promises longer queries than its dummies are.
            mixed = batch.num_reqs * (batch.max_query_len or 0) > batch.num_tokens
            self.mode = VerifyMode.MIXED if mixed else VerifyMode.ALL
        elif drafts is None or not drafts.any():
            self.mode = VerifyMode.NONE
        else:
            self.mode = VerifyMode.ALL if drafts.all() else VerifyMode.MIXED
            if self.mode is VerifyMode.MIXED:
                self.counters.mixed_replays += is_graph
                self.counters.mixed_launches += not is_graph

    def plain_metadata(self, metadata: Any) -> Any:
        """The platform's metadata with `plain_lens`, made once for each of a pass.

        Args:
            metadata: vLLM's of the FLASH_ATTN backend, for FlashAttention 3: it writes zeros for a
                query without keys. Its schedule was made for other lengths and is dropped: each
                layer makes its own on the device.
        """
        known = self._plain.get(id(metadata))
        if known is None:
            plain = copy.copy(metadata)
            plain.seq_lens = self.rows.plain_lens[: metadata.seq_lens.shape[0]]
            plain.scheduler_metadata = None
            # Keep the original alive: its id() may be reused once it is freed.
            known = self._plain[id(metadata)] = metadata, plain
        return known[1]
