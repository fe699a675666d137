"""Drafts that carry their parents from the worker to the engine core, in one integer each.

A grammar advances in the engine core, where vLLM brings the drafts' tokens, but not the topology of
a tree. A token's id has 32 bits, so the parent travels in the bits above. Such integers survive all
that vLLM does with lists of tokens: they are cut to a prefix and padded with -1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_graft.seams.wrap import wrap

if TYPE_CHECKING:
    import torch
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from vllm_graft.spec_decode.trees.topology import TreeState

TOKEN_BITS = 32
_TOKEN = (1 << TOKEN_BITS) - 1


class DraftTree(NamedTuple):
    """A request's tree, on the host: token and parent of each node, parents before children. Node 0
    is the root, with -1 for both: its token is no draft."""

    tokens: list[int]
    parents: list[int]

    @property
    def children(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], 1):
            found[parent].append(node)
        return found

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to `node`; the root's path is empty."""
        found = []
        while node > 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]


def pack(tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """Put each draft's parent above its token; padding stays as it was.

    Args:
        tokens: int64 ``[num_reqs, n]``, drafts; negative ones are padding.
        parents: int32 ``[num_reqs, n]``, node index of each draft's parent; 0 is the root.
    """
    return tokens.where(tokens < 0, tokens + (parents.long() + 1 << TOKEN_BITS))


def is_packed(drafts: Sequence[int]) -> bool:
    """Whether a list of drafts carries parents; a list of padding does not."""
    return bool(drafts) and drafts[0] > _TOKEN


def tokens_of(packed: Sequence[int]) -> list[int]:
    """The tokens alone; padding stays."""
    return [draft if draft < 0 else draft & _TOKEN for draft in packed]


def unpack(packed: Sequence[int]) -> DraftTree:
    """Read the drafts before the first padding."""
    tree = DraftTree([-1], [-1])
    for draft in packed:
        if draft < 0:
            break
        tree.tokens.append(draft & _TOKEN)
        tree.parents.append((draft >> TOKEN_BITS) - 1)
    return tree


def send_parents(worker: Any) -> None:
    """Let the drafts of a worker, which has loaded its model, carry their parents. VLLM copies
    drafts to the host only in steps with structured output, and so do we."""
    context = worker.model_runner.speculator.context
    # Chains need no parents: vLLM's own way is right for them.
    if context.shape.topk > 1:
        tree: TreeState = context.tree

        def then_pack(original: Callable[..., None]) -> Callable[..., None]:
            def set_draft_tokens(input_batch: InputBatch, draft_tokens: torch.Tensor) -> None:
                if input_batch.has_structured_output_reqs:
                    nodes = slice(1, 1 + draft_tokens.shape[1])
                    parents = tree.parents[input_batch.idx_mapping, nodes]
                    draft_tokens = pack(draft_tokens, parents)
                original(input_batch, draft_tokens)

            return set_draft_tokens

        wrap(worker.model_runner.draft_tokens_handler, "set_draft_tokens", then_pack)
