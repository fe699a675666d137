"""State that the tree parts of one worker share: topology, row masks and the accepted path."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch

from vllm_graft.spec_decode.kernels.compact import TokenRows, follow_path
from vllm_graft.spec_decode.kernels.verify import TreeRows, prepare_rows
from vllm_graft.spec_decode.trees.tree import TreeState
from vllm_graft.spec_decode.verification.accepted_kv import LayerSaves

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
    from vllm.v1.worker.gpu.states import RequestState

    from vllm_graft.spec_decode.kernels.attention.attention_plan import AttentionWorkspace
    from vllm_graft.spec_decode.trees.tree import TreeShape

T = TypeVar("T")
Made = TypeVar("Made")


class TextWatch(Protocol):
    """Something that reads the requests' texts, where the engine keeps them."""

    def attach(self, req_states: RequestState) -> None:
        """Read from there. The engine calls it once, before anything is drafted."""

    def begin(self, req_index: int, request: NewRequestData) -> None:
        """A new request, or one that goes on after a preemption, has this request-state index."""


class VerifyMode(enum.Enum):
    """The requests of the coming forward pass that need the ancestor mask."""

    NONE = enum.auto()
    """No request carries drafts: the platform's attention computes all rows."""
    MIXED = enum.auto()
    """Some requests carry drafts: the tree kernel overwrites what the platform's has computed."""
    ALL = enum.auto()
    """Every request carries drafts, as in a FULL graph of decodes: only tree attention runs."""


@dataclass
class VerifyStep:
    """One target pass over drafts, from its preparation to the draft's extend pass. `num_drafts`:
    int32 ``[>= num_reqs]``, nodes that are verified per request, not counting roots. `depth_shift`:
    int64 ``[num_tokens_padded]``, what the tree added to each row's linear position; only for
    targets with multi-dimensional positions. `num_sampled`: int32 ``[num_reqs]``, length of the
    accepted path; None before verification."""

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
    positions_drafted: int = 0
    """Positions that blocks have predicted, of all requests; 0 where the draft runs by levels."""
    draft_replays: int = 0
    """Growths of a batch's trees that ran as one graph."""
    draft_launches: dict[str, int] = field(default_factory=dict)
    """Growths without a graph, by reason, one of `LAUNCH_REASONS`."""
    rank_checks: int = 0
    """Batches whose trees were compared between tensor-parallel ranks."""
    tree_replays: int = 0
    """Steps in which every request verified a tree that ran as one graph; launches ran as none."""
    tree_launches: int = 0
    mixed_replays: int = 0
    """Steps with prompts beside trees likewise; for launches no graph had enough rows."""
    mixed_launches: int = 0
    cut_steps: int = 0
    """Steps with prompts beside trees that were cut, some to their roots, to fit a graph."""
    chunked_steps: int = 0
    """Steps whose prompts were computed in part, so that the step fits a graph."""

    def count_launch(self, reason: str) -> None:
        self.draft_launches[reason] = self.draft_launches.get(reason, 0) + 1


@dataclass
class TreeContext:
    """Persistent tensors of the tree part; addresses are stable, so CUDA graphs may hold them.

    Attributes:
        shape: bounds of the trees.
        tree: topology of the drafted trees by request-state index.
        by_temperature: bool ``[max_reqs]`` by request-state index, on the host: requests whose
            logits only temperature changes.
        rows: which rows of the batch belong to trees.
        path: int32 ``[max_reqs, num_nodes + 1]`` by batch row, accepted nodes.
        emitted: int32 ``[vocab]``, how often each token was emitted; None if nothing learns.
        teaches: int32 ``[max_reqs]`` by request-state index, 0 for requests whose tokens are not
            counted; None if all are.
        extra_nodes: int64 ``[max_reqs]`` by request-state index, bit ``j`` is set if node ``j`` of
            the drafted tree is of another source than the draft; None if there is none. With a
            memory ``[2, max_reqs]``: the second row is of the nodes from there.
        extra_counts: int64 ``[2]`` or ``[4]``, how many such nodes were verified and accepted.
        coupled: whether drafts may look at the noise of the target's draws.
        draft_window: tokens before a tree that the draft's attention sees at least; 0 for all.
        kept: which rows of recurrent layers have left inputs, which take `kept_bytes` of the
            device; None if no layer keeps them (see ``recurrent_form`` of `TreeConfig`).
        mode: which requests of the coming pass the tree kernel computes.
        step: the pass under way.
        reads_rows: whether layers read `rows` of steps without drafts, as recurrent ones do.
        plain_sizes: requests, and as many tokens, of the captured graphs of one token per request,
            which compute attention as stock vLLM does.
        has_mixed: whether graphs of mixed batches were captured, which read `rows`.
    """

    shape: TreeShape
    tree: TreeState
    by_temperature: np.ndarray
    rows: TreeRows
    path: torch.Tensor
    workspace: AttentionWorkspace
    emitted: torch.Tensor | None = None
    teaches: torch.Tensor | None = None
    extra_nodes: torch.Tensor | None = None
    extra_counts: torch.Tensor | None = None
    watches: tuple[TextWatch, ...] = ()
    coupled: bool = True
    draft_window: int = 0
    recurrent_form: str = "states"
    kept: Any = None
    kept_bytes: int = 0
    mode: VerifyMode = VerifyMode.NONE
    step: VerifyStep | None = None
    reads_rows: bool = True
    plain_sizes: set[int] = field(default_factory=set)
    has_mixed: bool = False
    counters: Counters = field(default_factory=Counters)
    saves: LayerSaves = field(default_factory=LayerSaves)
    _no_drafts: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))
    _made: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    """A metadata object and what was made of it for the coming pass, by its ``id()``."""

    @classmethod
    def allocate(
        cls,
        shape: TreeShape,
        max_reqs: int,
        max_tokens: int,
        workspace: AttentionWorkspace,
        device: torch.device,
    ) -> TreeContext:
        width = shape.num_nodes + 1
        return cls(
            shape=shape,
            tree=TreeState.allocate(max_reqs, shape.num_nodes, device),
            by_temperature=np.zeros(max_reqs, dtype=bool),
            rows=TreeRows.allocate(max_reqs, max_tokens, device),
            path=torch.zeros(max_reqs, width, dtype=torch.int32, device=device),
            workspace=workspace,
            _no_drafts=torch.zeros(max_reqs, dtype=torch.int32, device=device),
        )

    def begin(
        self, batch: InputBatch, num_computed: torch.Tensor, *, keep_shift: bool = False
    ) -> VerifyStep:
        """Write the drafts' depths into the batch's positions and their ancestors into the masks.
        The batch is real and has its slot mapping already: node i must keep the slot of the i-th
        new token whatever its depth. `num_computed` is int32 ``[max_reqs]`` by request-state index.
        With `keep_shift` the step keeps the change of the positions as its `depth_shift`."""
        no_drafts = batch.num_draft_tokens == 0
        if no_drafts and not self._needs_rows(batch):
            self.step = VerifyStep(batch, self._no_drafts)
            return self.step
        linear = batch.positions.clone() if keep_shift else None
        prepare_rows(
            self.tree,
            batch,
            num_computed,
            self.rows,
            # A FULL graph holds the tree kernel alone, unless its queries have one token, and then
            # has to compute requests without drafts.
            plain_rows=no_drafts,
            max_rows=self.tree.width,
        )
        shift = None if linear is None else batch.positions - linear
        self.step = VerifyStep(batch, self.rows.num_drafts, shift)
        if not no_drafts:
            self.counters.verify_steps += 1
        self.counters.nodes_verified += batch.num_draft_tokens
        return self.step

    def _needs_rows(self, batch: InputBatch) -> bool:
        """Whether anything reads rows of a step without drafts: not where requests have one token
        and attention is the platform's. A small target's steps are as long as the host's work."""
        if self.reads_rows or batch.num_tokens != batch.num_reqs:
            return True
        alone = batch.decode_graph_eligible and batch.num_tokens_after_padding in self.plain_sizes
        return self.has_mixed and not alone

    def choose_mode(self, batch: InputBatch, for_capture: bool, *, is_graph: bool = False) -> None:
        """Decide on the host how the coming pass, which may be captured or be the replay of one
        graph, computes attention."""
        self._made.clear()
        drafts = batch.num_draft_tokens_per_req
        if for_capture:
            # vLLM's warm-up has left the rows of its batch here. The queries of a captured graph
            # may be narrower and lack such rows.
            self.rows.clear()
            # A graph of mixed batches declares longer queries than its dummy requests have.
            mixed = batch.num_reqs * (batch.max_query_len or 0) > batch.num_tokens
            self.mode = VerifyMode.MIXED if mixed else VerifyMode.ALL
            self.has_mixed = self.has_mixed or mixed
            if batch.max_query_len == 1:
                # Queries of one token have no drafts: a step without drafts is stock vLLM's.
                self.mode = VerifyMode.NONE
                self.plain_sizes.add(batch.num_tokens)
        elif drafts is None or not drafts.any():
            self.mode = VerifyMode.NONE
        else:
            self.mode = VerifyMode.ALL if drafts.all() else VerifyMode.MIXED
            what = "tree" if self.mode is VerifyMode.ALL else "mixed"
            counter = f"{what}_{'replays' if is_graph else 'launches'}"
            setattr(self.counters, counter, getattr(self.counters, counter) + 1)

    def once(self, metadata: T, make: Callable[[T], Made]) -> Made:
        """What `make` makes of a metadata object, once per pass: all layers ask for the same."""
        if id(metadata) not in self._made:
            # Keep the original alive: its id() may be reused once it is freed.
            self._made[id(metadata)] = metadata, make(metadata)
        made: Made = self._made[id(metadata)][1]
        return made

    def plain_metadata(self, metadata: Any) -> Any:
        """The platform's metadata, made once per pass, with `plain_lens` as its lengths, so that
        FlashAttention 3, which writes zeros for a query without keys, skips tree rows. The copy has
        no schedule, which was made for other lengths: each layer makes its own on the device."""

        def without_trees(metadata: Any) -> Any:
            plain = copy.copy(metadata)
            plain.seq_lens = self.rows.plain_lens[: metadata.seq_lens.shape[0]]
            plain.scheduler_metadata = None
            return plain

        return self.once(metadata, without_trees)


class AcceptedRows:
    """Memory for a batch's rows behind a move of each accepted path to the front of its request. It
    takes sizes and dtypes of the draft's buffers. `states` is ``[max_num_tokens, hidden]``, where
    the draft reads the target's states."""

    def __init__(self, buffers: InputBuffers, states: torch.Tensor) -> None:
        ids, positions = map(torch.zeros_like, (buffers.input_ids, buffers.positions))
        self.rows = TokenRows(ids, positions, states)

    def move(
        self, context: TreeContext, batch: InputBatch, hidden: torch.Tensor, max_reqs: int
    ) -> tuple[InputBatch, torch.Tensor]:
        """Move the rows of accepted paths to the front, where a chain would have them. `hidden`,
        ``[num_tokens, hidden]``, are the target's states of the rows of `batch`, which it has
        verified; `max_reqs` is the same in each call. Returns the batch with ids and positions in
        that order, and the states; what was given if no request had drafts."""
        step = context.step
        if step is None or step.num_sampled is None or not batch.num_draft_tokens:
            return batch, hidden
        num_tokens = batch.num_tokens_after_padding
        follow_path(
            context.path, step.num_sampled, batch.query_start_loc, step.num_drafts,
            TokenRows(batch.input_ids, batch.positions, hidden), self.rows, num_reqs=batch.num_reqs,
            num_tokens=num_tokens, max_reqs=max_reqs,
        )  # fmt: skip
        moved = copy.copy(batch)
        moved.input_ids = self.rows.ids[:num_tokens]
        moved.positions = self.rows.positions[:num_tokens]
        # vLLM's propose copies these states onto themselves, which costs nothing.
        return moved, self.rows.states[:num_tokens]
