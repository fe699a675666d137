"""VLLM's own chain in the place of trees that a preset asked for and a loaded model rules out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_graft.base.log import warning_once
from vllm_graft.base.options import flag
from vllm_graft.spec_decode.presets.node_count import leave_to_stock

if TYPE_CHECKING:
    from vllm_graft.spec_decode.drafters.tree_drafting import TreeDrafting


class StockChain(DraftModelSpeculator):
    """Mixed into one of vLLM's speculators, in an engine that counts the nodes of a tree.

    CPython assigns a class to ``__class__`` only if both grow from the same one.

    Attributes:
        width: drafts per request that the engine has columns for.
    """

    width: int
    num_speculative_steps: int

    def propose(
        self, *args: Any, num_speculative_tokens: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Draft a chain, int64 ``[num_reqs, width]``; columns behind it are of no meaning."""
        tokens = self.num_speculative_steps
        if num_speculative_tokens is not None:
            tokens = min(tokens, num_speculative_tokens)
        drafts = super().propose(*args, num_speculative_tokens=tokens, **kwargs)
        return torch.nn.functional.pad(drafts, (0, self.width - drafts.shape[1]))


def become_stock(drafter: TreeDrafting, why: str) -> None:
    """Turn a drafter that has loaded its draft, and grafted nothing yet, into a `StockChain`."""
    trees = drafter.trees
    depth = min(leave_to_stock(trees.engine_config), drafter.num_speculative_steps)
    stock = next(each for each in type(drafter).__mro__ if each.__module__.startswith("vllm."))
    chain: Any = drafter
    chain.__class__ = type(f"{StockChain.__name__}Over{stock.__name__}", (StockChain, stock), {})
    chain.width, chain.num_speculative_steps = trees.num_nodes, depth
    chain.draft_tokens = chain.draft_tokens.new_zeros(chain.max_num_reqs, depth)
    del chain.trees  # And with it the process that compiles its kernels ahead.
    warning_once(
        f"{flag('tree')} was turned on by a preset, but the loaded model rules trees out: {why}. "
        f"VLLM's own {stock.__name__} drafts chains of {depth} tokens instead"
    )
