"""One step of tree speculation in eight stages, over models that are callables: begin to read here.
State and kernels are the engine's own, and vLLM is not needed. Each stage names the file in which
the engine runs it. There a step begins in the middle: the target verifies the trees of the step
before, then the next ones are drafted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm_graft.spec_decode.kernels.candidates import expand_frontier, finish_tree, seed_frontier
from vllm_graft.spec_decode.kernels.compact import KVCacheTable, compact_kv
from vllm_graft.spec_decode.kernels.verify import walk_tree
from vllm_graft.spec_decode.trees.tree import CandidateTable
from vllm_graft.spec_decode.verification.context import AcceptedRows

if TYPE_CHECKING:
    from vllm_graft.spec_decode.drafters.draft_trees import Sources
    from vllm_graft.spec_decode.verification.context import TreeContext, VerifyStep

Pair = tuple[torch.Tensor, torch.Tensor]


class TreeSteps:
    """A few requests from their prompts on.

    Args:
        context: holds the trees, and what the stages tell each other.
        models: draft and target.
        slots: int64 ``[num_reqs, max_len]``, slot of the target's K/V at each position.
        sources: of candidates beside the draft.
    """

    verified: VerifyStep
    states: torch.Tensor  # [num_tokens, hidden], the target's

    def __init__(
        self, context: TreeContext, models: Models, slots: torch.Tensor, sources: Sources | None
    ) -> None:
        self.context, self.models, self.slots, self.sources = context, models, slots, sources
        self.shape, self.tree, self.count = context.shape, context.tree, len(slots)
        extra = sources.columns(self.shape.num_nodes) if sources else 0
        size = (self.count, self.shape.topk, self.shape.steps)
        self.table = CandidateTable.allocate(*size, slots.device, extra=extra)
        self.arange = partial(torch.arange, device=slots.device)
        self.idx_mapping = self.roots = self.arange(self.count)
        self.num_computed = self.idx_mapping.int() * 0  # tokens whose K/V the target has

    def begin(self, prompts: Sequence[torch.Tensor]) -> list[list[int]]:
        """Read prompts, of at most `tree.width` ids each: they are queries without drafts."""
        return self.walk(self.draw(self.verify(prompts, 0)))

    def step(self) -> list[list[int]]:
        """Return what each request gets, one token or more: draws of the target alone."""
        states = self.extend()
        self.grow_levels(states)
        num_extra = self.add_sources()
        drafts = self.finish(num_extra)
        queries = torch.cat([self.roots[:, None], drafts], dim=1)
        logits = self.verify(list(queries), self.shape.num_nodes)
        drawn = self.draw(logits)
        emitted = self.walk(drawn)
        self.compact()
        return emitted

    def extend(self) -> torch.Tensor:
        """The draft reads what was accepted: ``drafters/target_dependent.py``."""
        accepted = AcceptedRows(self.verified.batch, torch.empty_like(self.states))
        batch, states = accepted.move(self.context, self.verified.batch, self.states, self.count)
        found = []
        for r, first in enumerate(batch.query_start_loc[:-1].tolist()):
            end = first + int(self.num_computed[r] - batch.positions[first])
            ids = torch.cat([batch.input_ids[first + 1 : end], self.roots[r : r + 1]])
            own = batch.positions[first:end], states[first:end]
            found.append(self.models.extend(r, ids, *own))
        return torch.stack(found)

    def grow_levels(self, states: torch.Tensor) -> None:
        """For each level the draft reads the best nodes of the last one: ``drafters/levels.py``."""
        topk, drawn_at = self.shape.topk, self.num_computed.long()
        logp, ids = self.models.top(states, drawn_at, topk)
        seed_frontier(self.table, logp, ids, self.count)
        tokens, parents = ids.flatten(), self.idx_mapping.repeat_interleave(topk)
        drawn_at = drawn_at[parents]
        for level in range(1, self.shape.steps):
            states = self.models.read(tokens, states[parents])
            logp, ids = self.models.top(states, drawn_at + level, topk)
            expand_frontier(self.table, level, logp, ids, self.count, tokens, parents)

    def add_sources(self) -> int:
        """Other sources add candidates: ``drafters/draft_trees.py``, ``lookup/ngrams.py``."""
        drafter: Any = self  # Its `idx_mapping` is read.
        size = self.count, self.shape.steps, self.shape.num_nodes
        return self.sources.add(self.table, drafter, *size) if self.sources else 0

    def finish(self, num_extra: int) -> torch.Tensor:
        """The best candidates become the tree: ``drafters/tree_drafting.py``. Returns its tokens,
        int64 ``[num_reqs, num_nodes]``; the context has its topology."""
        size = self.count, self.shape.steps, self.shape.num_nodes
        drafts = self.roots.new_empty(self.count, self.shape.num_nodes)
        extra_nodes = self.roots.new_empty(self.count) if num_extra else None
        finish_tree(
            self.table, *size, self.idx_mapping, self.tree, drafts,
            num_extra=num_extra, extra_nodes=extra_nodes,
        )  # fmt: skip
        return drafts

    def verify(self, queries: Sequence[torch.Tensor], num_drafts: int) -> torch.Tensor:
        """Node i has the i-th new slot, and the target runs once: ``targets/model_state.py``.
        Returns logits ``[num_logits, vocab]``."""
        ends = [*accumulate(len(query) for query in queries)]
        firsts = zip(self.num_computed.tolist(), queries, strict=True)
        linear = [self.arange(first, first + len(query)) for first, query in firsts]
        batch: Any = SimpleNamespace(  # as far as it is read, vLLM's InputBatch
            num_reqs=self.count,
            num_reqs_after_padding=self.count,
            num_tokens_after_padding=ends[-1],
            num_draft_tokens=self.count * num_drafts,
            idx_mapping=self.idx_mapping,
            query_start_loc=self.num_computed.new_tensor([0, *ends]),
            cu_num_logits=self.arange(self.count + 1).int() * (num_drafts + 1),
            # Tokens are drawn at a tree's rows, and at a prompt's last one.
            logits_indices=torch.cat([self.arange(end - 1 - num_drafts, end) for end in ends]),
            input_ids=torch.cat(list(queries)),
            positions=torch.cat(linear),
            slots=torch.cat([self.slots[r, each] for r, each in enumerate(linear)]),
        )
        # Positions become depths, and rows get their ancestors: `kernels/rows.py`.
        self.verified = self.context.begin(batch, self.num_computed)
        logits, self.states = self.models.target(batch, self.context)
        return logits[batch.logits_indices]

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """The target's token at every node, int64 ``[num_logits]``: ``verification/sampler.py``."""
        batch, rows = self.verified.batch, self.verified.batch.logits_indices
        requests = torch.searchsorted(batch.query_start_loc[1:], rows, right=True)
        return self.models.sample(logits, requests, batch.positions[rows])

    def walk(self, drawn: torch.Tensor) -> list[list[int]]:
        """From the root on, follow the child that was drawn: ``verification/sampler.py``."""
        batch = self.verified.batch
        sampled = drawn.new_empty(self.count, self.tree.width)
        num_sampled = self.verified.num_sampled = torch.empty_like(self.num_computed)
        walk_tree(
            drawn, batch.input_ids[batch.logits_indices], batch.cu_num_logits, batch.idx_mapping,
            self.tree, sampled, self.context.path, num_sampled,
        )  # fmt: skip
        self.num_computed += num_sampled if batch.num_draft_tokens else batch.query_start_loc.diff()
        self.roots = sampled[self.idx_mapping, num_sampled.long() - 1]
        return [row[:n] for row, n in zip(sampled.tolist(), num_sampled.tolist(), strict=True)]

    def compact(self) -> None:
        """K/V of the accepted path moves to where a chain's lies: ``targets/dense``."""
        step, slots = self.verified, self.verified.batch.slots[None]
        compact_kv(
            self.models.kv, self.context.path, step.num_sampled, step.batch.query_start_loc,
            step.num_drafts, slots, num_reqs=self.count,
        )  # fmt: skip


class Models(NamedTuple):
    """The models. States are ``[rows, hidden]``.

    Attributes:
        extend: the draft reads a request's accepted rows: its number, then of each row the token
            after it, the position and the target's state. Returns its own state ``[hidden]``.
        read: the draft's states behind one more token each.
        top: log-probabilities f32 and ids int64 ``[rows, topk]`` of the draft's best next tokens,
            from states, positions of the target's rows that will draw them, and ``topk``.
        target: logits ``[num_tokens, vocab]`` and states of a batch, whose K/V goes to its slots. A
            row sees the tokens before its query, and rows of the query by the context's masks.
        kv: the target's K/V.
        sample: tokens int64 ``[rows]`` from logits, requests and positions of the target's rows.
    """

    extend: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    top: Callable[[torch.Tensor, torch.Tensor, int], Pair]
    target: Callable[[Any, TreeContext], Pair]
    kv: KVCacheTable
    sample: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
