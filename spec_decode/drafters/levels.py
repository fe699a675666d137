"""The levels of the draft tree below its first: their tensors, and the passes that fill them."""

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from vllm.config import VllmConfig
from vllm.forward_context import BatchDescriptor, set_forward_context

from vllm_graft.spec_decode.drafters.base import Drafter, Growth
from vllm_graft.spec_decode.heads.head import DraftHead
from vllm_graft.spec_decode.kernels.candidates import expand_frontier, seed_frontier
from vllm_graft.spec_decode.kernels.topk import Noise
from vllm_graft.spec_decode.targets.dense.layer import NO_LEVEL, DraftTreeMetadata
from vllm_graft.spec_decode.trees.tree import CandidateTable, TreeShape


class LevelMemory:
    """Scratch memory that the trees of all shapes share, the largest of which decides its size.

    Each tree writes before it reads, and one tree is grown at a time, on one stream. Of the draft's
    attention layers those with ``kv_lora_rank`` have MLA. Those with
    ``kv_sharing_target_layer_name`` keep nothing of a tree, as they read K/V of another layer.
    `extra` is the columns of the tables of candidates that are for other sources than the draft."""

    def __init__(
        self, shapes: Collection[TreeShape], layers: Mapping[str, Any], *, max_reqs: int,
        dtype: torch.dtype, device: torch.device, extra: int = 0,
    ) -> None:  # fmt: skip
        most = max(shape.steps * shape.topk for shape in shapes)
        self._heads = {name: _heads(layer) for name, layer in layers.items()}
        self._readers = {
            name
            for name, layer in layers.items()
            if getattr(layer, "kv_sharing_target_layer_name", None)
        }
        self.max_reqs, self.dtype, self.device, self.extra = max_reqs, dtype, device, extra
        self._scratch = {
            name: torch.zeros(
                0 if name in self._readers else max_reqs * most * heads * size,
                dtype=dtype,
                device=device,
            )
            for name, (heads, size) in self._heads.items()
        }

    def scratch(self, shape: TreeShape) -> dict[str, torch.Tensor]:
        """K/V of one shape's trees by draft layer, ``[max_reqs, steps * topk, heads, 2 * size]``.
        With MLA it is ``[..., 1, rank + rope]``; a layer that reads another's K/V has no slots."""
        return {name: self._slots(name, flat, shape) for name, flat in self._scratch.items()}

    def _slots(self, name: str, flat: torch.Tensor, shape: TreeShape) -> torch.Tensor:
        slots = 0 if name in self._readers else shape.steps * shape.topk
        used = flat[: self.max_reqs * slots * math.prod(self._heads[name])]
        return used.view(self.max_reqs, slots, *self._heads[name])

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self._scratch.values())


def _heads(layer: Any) -> tuple[int, int]:
    """How many heads a layer keeps of a token, and numbers of each."""
    if getattr(layer, "kv_lora_rank", None):
        return 1, layer.head_size  # A latent and its rotated part.
    return layer.num_kv_heads, 2 * layer.head_size


Metadata = dict[str, DraftTreeMetadata]
GrowthT = TypeVar("GrowthT", bound="Growth")


def growths_by_levels(
    shapes: Collection[TreeShape], make: Callable[[TreeShape], GrowthT]
) -> dict[TreeShape, GrowthT]:
    """Make one growth for each width and depth, which all shapes with them share."""
    levels: dict[tuple[int, int], GrowthT] = {}
    for shape in shapes:
        if (shape.topk, shape.steps) not in levels:
            levels[shape.topk, shape.steps] = make(shape)
    return {shape: levels[shape.topk, shape.steps] for shape in shapes}


class Roots:
    """The root of each request's tree: the state that its children are drafted from, and these.
    `best`: the best children's log-probabilities f32 and ids int64, ``[max_reqs, topk]`` each.
    `states`: ``[max_reqs, hidden]``, the draft's output at the last token of each request; None
    before a first pass has kept any."""

    states: torch.Tensor | None = None

    def __init__(self, max_reqs: int, topk: int, device: torch.device) -> None:
        logp = torch.zeros(max_reqs, topk, dtype=torch.float32, device=device)
        self.best = logp, torch.zeros_like(logp, dtype=torch.int64)

    def children(self, num_reqs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the children of the first requests are, ``[num_reqs, topk]`` each."""
        logp, tokens = self.best
        return logp[:num_reqs], tokens[:num_reqs]

    def keep(self, states: torch.Tensor) -> torch.Tensor:
        """Keep a first pass's states; return the best children so far, int64 ``[num_reqs]``."""
        num_reqs, hidden = states.shape
        if self.states is None:
            # vLLM's profiling run comes here first, before anything is captured.
            self.states = states.new_zeros(len(self.best[0]), hidden)
        self.states[:num_reqs].copy_(states)
        return self.children(num_reqs)[1][:, 0]

    def draft(
        self, head: DraftHead, num_reqs: int, noise: Noise | None, *, narrow: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft the children from the states; see `Drafter.draft_first_level`."""
        assert self.states is not None, "the first pass has not run"
        out = self.children(num_reqs)
        return head.top(self.states[:num_reqs], out=out, noise=noise, narrow=narrow)


class LevelGrowth:
    """A `Growth` by levels: one pass of the draft per level, over ``topk`` rows per request.

    The tree's K/V lies in a dense scratch instead of paged look-ahead slots.

    Attributes:
        tokens: int32 or int64 ``[max_reqs * topk]``, the frontier's tokens.
        parents: int64 ``[max_reqs * topk]``, row of each frontier node's parent one level up.
        depths: int64 ``[steps - 1]``, depth below the root of each frontier that a pass runs over.
        prefix_lens: int32 ``[max_reqs]``, the draft's keys in the paged cache.
        block_tables: int32 ``[max_reqs, max_blocks]`` by draft layer, in blocks of its kernel.
        one_position: whether the draft runs all levels at the position of the last accepted token.
    """

    def __init__(
        self,
        shape: TreeShape,
        memory: LevelMemory,
        token_dtype: torch.dtype,
        *,
        one_position: bool = False,
    ) -> None:
        max_reqs, device = memory.max_reqs, memory.device
        rows = max_reqs * shape.topk
        self.shape = shape
        self.candidates = CandidateTable.allocate(
            max_reqs, shape.topk, shape.steps, device, extra=memory.extra
        )
        self.tokens = torch.zeros(rows, dtype=token_dtype, device=device)
        self.parents = torch.zeros(rows, dtype=torch.int64, device=device)
        self.depths = torch.arange(1, shape.steps, device=device)
        # The request of each row of the first frontier. Indexing by it is quicker than a repeat.
        self._roots = torch.arange(rows, device=device) // shape.topk
        self.prefix_lens = torch.zeros(max_reqs, dtype=torch.int32, device=device)
        self._live = 0
        """How many of the first `prefix_lens` may differ from 0."""
        self.block_tables: dict[str, torch.Tensor] = {}
        self.scratch = memory.scratch(shape)
        self.one_position = one_position

    def seed(self, logp: torch.Tensor, tokens: torch.Tensor) -> None:
        """Make the root's best children, ``[num_reqs, >= topk]`` each, the first level."""
        seed_frontier(self.candidates, logp, tokens, logp.shape[0], next_tokens=self.tokens)

    def set_prefix(self, seq_lens: torch.Tensor, num_rejected: torch.Tensor) -> None:
        num_reqs = num_rejected.shape[0]
        if num_reqs < self._live:
            self.prefix_lens[num_reqs : self._live].zero_()
        self._live = num_reqs
        torch.sub(seq_lens[:num_reqs], num_rejected, out=self.prefix_lens[:num_reqs])

    def clear_prefix(self) -> None:
        self.prefix_lens.zero_()

    def map_block_tables(self, drafter: Any) -> None:
        tables = drafter.block_tables.input_block_tables
        for group in (group for groups in drafter.attn_groups for group in groups):
            table = group.map_to_kernel_block_table(tables[group.kv_cache_group_id])
            self.block_tables.update(dict.fromkeys(group.layer_names, table))

    def metadata(self, num_reqs: int, max_seq_len: int) -> list[Metadata]:
        return [
            {
                name: DraftTreeMetadata(
                    level=level if scratch.shape[1] else NO_LEVEL,
                    topk=self.shape.topk,
                    num_reqs=num_reqs,
                    prefix_lens=self.prefix_lens[:num_reqs],
                    block_table=self.block_tables[name][:num_reqs],
                    ancestors=self.candidates.ancestors,
                    scratch=scratch,
                    max_seq_len=max_seq_len,
                )
                for name, scratch in self.scratch.items()
            }
            for level in range(self.shape.steps - 1)
        ]

    def grow(
        self, drafter: Drafter, num_reqs: int, metadata: list[Metadata] | None,
        num_tokens_across_dp: torch.Tensor | None = None, *, num_nodes: int, narrow: bool = False,
    ) -> int:  # fmt: skip
        """Draft the first level, and each level below it by a pass of the draft; see `Growth.grow`.
        Parents rank before children: the best n nodes lie in n levels, and no deeper one is run."""
        shape, steps = self.shape, min(self.shape.steps, num_nodes)
        self.seed(*drafter.draft_first_level(num_reqs, narrow=narrow))
        # Positions of all rows and levels at once; a level's are contiguous, as in vLLM's passes.
        last_position = drafter.last_positions[:num_reqs, None].expand(-1, shape.topk)
        positions_of = last_position + self.depths[: steps - 1, None, None]
        positions_of = positions_of.clamp_(max=drafter.max_model_len - 1).flatten(1)
        read_at = last_position.flatten() if self.one_position else None
        feedback = drafter.last_states
        for level in range(steps - 1):
            positions = positions_of[level]
            output, feedback = drafter.run_frontier(
                self.tokens[: positions.shape[0]],
                positions if read_at is None else read_at,
                self._states(feedback, num_reqs, level),
                None if metadata is None else metadata[level],
                num_tokens_across_dp,
            )
            # A row at one position yields the states for the token at the next position.
            noise = drafter.noise(num_reqs, positions, rows=shape.topk, offset=1)
            logp, tokens = drafter.head.top(output, shape.topk, noise=noise, narrow=narrow)
            expand_frontier(
                self.candidates, level + 1, logp, tokens, num_reqs, next_tokens=self.tokens,
                parent_rows=self.parents,
            )  # fmt: skip
        return steps

    def _states(self, feedback: torch.Tensor, num_reqs: int, level: int) -> torch.Tensor:
        """The states that a frontier continues from: a copy, as a pass may overwrite them."""
        rows = self.parents if level else self._roots
        return feedback[rows[: num_reqs * self.shape.topk]]


def frontier_context(
    vllm_config: VllmConfig, rows: int, metadata: Any, num_tokens_across_dp: torch.Tensor | None
) -> AbstractContextManager[Any]:
    """The forward context in which a draft runs over a frontier; see `Drafter.run_frontier`."""
    context: AbstractContextManager[Any] = set_forward_context(
        metadata,
        vllm_config,
        num_tokens=rows,
        num_tokens_across_dp=num_tokens_across_dp,
        # No slots: the tree's K/V goes to the scratch, the paged cache is only read.
        slot_mapping={},
        batch_descriptor=BatchDescriptor(num_tokens=rows),
    )
    return context
