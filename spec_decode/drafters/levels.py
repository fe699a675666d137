"""The levels of the draft tree below its first: their tensors, and the passes that fill them."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

from vllm_graft.spec_decode.attention.layer import DraftTreeMetadata
from vllm_graft.spec_decode.kernels.expand import expand_frontier, seed_frontier
from vllm_graft.spec_decode.trees.candidates import CandidateTable

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention

    from vllm_graft.spec_decode.drafters.base import Drafter
    from vllm_graft.spec_decode.trees.shape import TreeShape

Metadata = dict[str, DraftTreeMetadata]


class LevelMemory:
    """What levels of all shapes write before they read it, so that they can share it.

    One tree is grown at a time, on one stream.

    Args:
        shapes: that the memory is for.
        layers: the draft's attention layers, by name.
        max_reqs: requests at most.
        dtype: of K/V.
        device: of all.
    """

    def __init__(
        self,
        shapes: Collection[TreeShape],
        layers: dict[str, Attention],
        *,
        max_reqs: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        most = max(shape.steps * shape.topk for shape in shapes)
        self._heads = {
            name: (layer.num_kv_heads, 2 * layer.head_size) for name, layer in layers.items()
        }
        self.max_reqs, self.dtype, self.device = max_reqs, dtype, device
        self._scratch = {
            name: torch.zeros(max_reqs * most * heads * size, dtype=dtype, device=device)
            for name, (heads, size) in self._heads.items()
        }

    def scratch(self, shape: TreeShape) -> dict[str, torch.Tensor]:
        """K/V of a tree, ``[max_reqs, steps * K, num_kv_heads, 2 * head_size]`` a draft layer."""
        slots = shape.steps * shape.topk
        return {
            name: flat[: self.max_reqs * slots * math.prod(self._heads[name])].view(
                self.max_reqs, slots, *self._heads[name]
            )
            for name, flat in self._scratch.items()
        }

    @property
    def num_bytes(self) -> int:
        """Of the device."""
        return sum(each.nbytes for each in self._scratch.values())


class LevelGrowth:
    """Grows the trees of R requests, K frontier rows a request, in tensors of fixed addresses.

    A `Growth`. The tree's K/V lies in a dense scratch instead of paged look-ahead slots.

    Attributes:
        candidates: scores and ancestry of what was drafted.
        tokens: int32 or int64 ``[max_reqs * K]``, the frontier's tokens.
        parents: int64 ``[max_reqs * K]``, row of each frontier node's parent a level up.
        depths: int64 ``[steps - 1]``, below the root, of each frontier that a pass runs over.
        prefix_lens: int32 ``[max_reqs]``, the draft's keys in the paged cache.
        scratch: K/V of the tree, one tensor a draft layer,
            ``[max_reqs, steps * K, num_kv_heads, 2 * head_size]``.
        block_tables: int32 ``[max_reqs, max_blocks]`` a draft layer, in blocks of its kernel.
    """

    def __init__(self, shape: TreeShape, memory: LevelMemory, token_dtype: torch.dtype) -> None:
        max_reqs, device = memory.max_reqs, memory.device
        rows = max_reqs * shape.topk
        self.shape = shape
        self.candidates = CandidateTable.allocate(max_reqs, shape.topk, shape.steps, device)
        self.tokens = torch.zeros(rows, dtype=token_dtype, device=device)
        self.parents = torch.zeros(rows, dtype=torch.int64, device=device)
        self.depths = torch.arange(1, shape.steps, device=device)
        # The request of each row of the first frontier; one copy of rows is quicker than a repeat.
        self._roots = torch.arange(rows, device=device) // shape.topk
        self.prefix_lens = torch.zeros(max_reqs, dtype=torch.int32, device=device)
        self._live = 0
        """Of these, the first that may not be 0."""
        self.block_tables: dict[str, torch.Tensor] = {}
        self.scratch = memory.scratch(shape)

    def seed(self, logp: torch.Tensor, tokens: torch.Tensor) -> None:
        """Make the first level of the root's best children, ``[num_reqs, >= topk]`` each."""
        seed_frontier(self.candidates, logp, tokens, logp.shape[0], next_tokens=self.tokens)

    def set_prefix(self, seq_lens: torch.Tensor, num_rejected: torch.Tensor) -> None:
        """Note how many keys precede the tree, ``[num_reqs]`` each; padding has none."""
        num_reqs = num_rejected.shape[0]
        if num_reqs < self._live:
            self.prefix_lens[num_reqs : self._live].zero_()
        self._live = num_reqs
        torch.sub(seq_lens[:num_reqs], num_rejected, out=self.prefix_lens[:num_reqs])

    def clear_prefix(self) -> None:
        """Make every row padding: a run then reads no cache."""
        self.prefix_lens.zero_()

    def map_block_tables(self, drafter: Any) -> None:
        """Refresh the draft groups' block tables, in the block size of their kernels."""
        tables = drafter.block_tables.input_block_tables
        for group in (group for groups in drafter.attn_groups for group in groups):
            table = group.map_to_kernel_block_table(tables[group.kv_cache_group_id])
            self.block_tables.update(dict.fromkeys(group.layer_names, table))

    def metadata(self, num_reqs: int, max_seq_len: int) -> list[Metadata]:
        """Attention metadata of every level that runs, by layer name."""
        return [
            {
                name: DraftTreeMetadata(
                    level=level,
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
        self,
        drafter: Drafter,
        num_reqs: int,
        metadata: list[Metadata] | None,
        num_tokens_across_dp: torch.Tensor | None = None,
        *,
        num_nodes: int,
        narrow: bool = False,
    ) -> int:
        """Fill the table, a pass of the draft for each level below the first. Capturable.

        Parents come first, so the best n nodes lie in the first n levels: the others are not run.
        Arguments and result are those of `Growth.grow`.
        """
        shape, steps = self.shape, min(self.shape.steps, num_nodes)
        self.seed(*drafter.first_level(num_reqs))
        # Positions of all rows and levels at once; those of a level are contiguous, as vLLM's
        # passes have them.
        last_position = drafter.last_positions[:num_reqs, None].expand(-1, shape.topk)
        positions_of = last_position + self.depths[: steps - 1, None, None]
        positions_of = positions_of.clamp_(max=drafter.max_model_len - 1).flatten(1)
        feedback = drafter.last_states
        for level in range(steps - 1):
            positions = positions_of[level]
            output, feedback = drafter.run_frontier(
                self.tokens[: positions.shape[0]],
                positions,
                self._states(feedback, num_reqs, level),
                None if metadata is None else metadata[level],
                num_tokens_across_dp,
            )
            # A draft's row at a position yields states for the token at the next.
            noise = drafter.noise(num_reqs, positions, rows=shape.topk, offset=1)
            logp, tokens = drafter.head.top(output, shape.topk, noise=noise, narrow=narrow)
            expand_frontier(
                self.candidates,
                level + 1,
                logp,
                tokens,
                num_reqs,
                next_tokens=self.tokens,
                parent_rows=self.parents,
            )
        return steps

    def _states(self, feedback: torch.Tensor, num_reqs: int, level: int) -> torch.Tensor:
        """What the frontier of a level continues from, in a tensor that a pass may overwrite."""
        rows = self.parents if level else self._roots
        return feedback[rows[: num_reqs * self.shape.topk]]
