"""How deep trees of a block drafter may be: as many positions as a block predicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.models.refiner_sizes import is_refined, refiner_sizes


def trained_depth(speculative: Any) -> int | None:
    """Positions that predict a token in the blocks that a draft was trained with.

    Args:
        speculative: vLLM's speculative config, with ``method`` dflash or dspark.

    Returns:
        None if the draft's configuration does not say.
    """
    draft = getattr(speculative.draft_model_config, "hf_config", None)
    if is_refined(speculative):
        return refiner_sizes(draft).rows - 1
    nested = getattr(draft, "dflash_config", None)
    nested = nested if isinstance(nested, Mapping) else {}
    size = (
        nested.get("block_size")
        or getattr(draft, "block_size", None)
        or getattr(draft, "dspark_block_size", None)
    )
    if not isinstance(size, int) or size < 1:
        return None
    return size if from_anchor(speculative) else size - 1


def from_anchor(speculative: Any) -> bool:
    """Whether the last token's own position predicts the next token, as in most of DSpark's."""
    draft = getattr(speculative.draft_model_config, "hf_config", None)
    return speculative.method == "dspark" and getattr(draft, "sample_from_anchor", True)


def block_positions(tree: TreeConfig, speculative: Any) -> int:
    """Positions that predict a token in the longest block of an engine.

    The refiner of an XPress reads whole blocks. No block has more positions than a tree has nodes,
    as vLLM keeps slots of the K/V cache for so many.
    """
    nodes: int = tree.nodes or speculative.num_speculative_tokens
    whole = trained_depth(speculative) if is_refined(speculative) else None
    return min(tree.steps if whole is None else whole, nodes)


def block_rows(tree: TreeConfig, speculative: Any) -> int:
    """Rows per request of the one pass."""
    return block_positions(tree, speculative) + (not from_anchor(speculative))
