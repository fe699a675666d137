"""Facts that configurations tell of a draft: vocabulary, candidates, K/V, blocks and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_graft.base.options import target_of
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.models.chosen import has_model, is_block

CANDIDATE_KEYS = ("selector_top_k", "lilicorr_candidate_topk")
"""Keys of a draft's ``dflash_config`` that say how many candidates a position has."""

_ASSISTANTS = ("gemma4_mtp",)
"""Model types of drafts whose layers read the target's K/V and have none of their own."""

_DEPTH, _CANDIDATES, _RANK, _INNER = 15, 512, 256, 512
"""Depth, candidates, rank and inner width that vLLM takes where an XPress draft is silent."""


def is_assistant(draft: Any) -> bool:
    """Whether vLLM's model config of a draft, or None, is that of an assistant."""
    return getattr(getattr(draft, "hf_config", None), "model_type", None) in _ASSISTANTS


def draft_vocabulary(vllm_config: Any) -> int:
    """Tokens that the draft can propose; 0 if no model says."""
    draft = vllm_config.speculative_config.draft_model_config
    own = getattr(getattr(draft, "hf_config", None), "draft_vocab_size", None)
    target = target_of(vllm_config)
    return int(own or (0 if target is None else target.get_vocab_size()))


def num_candidates_of(speculative: Any) -> int | None:
    """Candidates per position of a DFlash 2 or LiLiCorr draft; None for other drafts."""
    draft = getattr(speculative.draft_model_config, "hf_config", None)
    draft_config = getattr(draft, "dflash_config", None)
    if not isinstance(draft_config, Mapping):
        return None
    counts = (draft_config.get(key) for key in CANDIDATE_KEYS)
    return next((int(count) for count in counts if isinstance(count, int)), None)


@dataclass(frozen=True)
class RefinerSizes:
    """Sizes of the refiner of an XPress draft, which vLLM knows since 0.33.

    Attributes:
        rows: rows of a block, that of the last token included.
        candidates: tokens of a position that get a bias; None for the whole vocabulary.
        rank: of the rows that are mixed.
        inner: width of the MLP.
    """

    rows: int
    candidates: int | None
    rank: int
    inner: int


def is_refined(speculative: Any) -> bool:
    """Whether the draft of vLLM's speculative config is an XPress."""
    asks = getattr(speculative, "is_xpress", None)
    return asks is not None and bool(asks())


def refiner_sizes(draft: Any) -> RefinerSizes:
    """Sizes of the refiner of an XPress draft with this ``hf_config``."""
    rows = getattr(draft, "xpress_block_size", None)
    return RefinerSizes(
        rows=rows or getattr(draft, "num_speculative_steps", _DEPTH) + 1,
        candidates=getattr(draft, "xpress_topc", _CANDIDATES) or None,
        rank=getattr(draft, "xpress_rank", _RANK),
        inner=getattr(draft, "xpress_mlp_hidden", _INNER),
    )


def trained_depth(speculative: Any) -> int | None:
    """Positions that predict a token in the blocks that a DFlash or DSpark draft was trained with;
    None if the draft's configuration does not say."""
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


DENSE_DRAFTS = frozenset(
    {
        "EagleLlama4ForCausalLM",
        "ErnieMTPModel",
        "LongCatFlashMTPModel",
        "MiMoV2MTPModel",
        "MiMoV2OmniMTPModel",
        "Step3p5MTP",
    }
)
"""Architectures of drafts without experts, although their configurations, often the target's, count
some."""


def draft_has_experts(config: TreeConfig, speculative: Any) -> bool:
    """Whether rows of a level read experts of the draft's.

    An MTP module says so in the target's own configuration. EAGLE-3 heads are dense whatever they
    were made for. Block drafters have no levels, and n-grams no draft model.
    """
    if speculative.method == "eagle3" or not has_model(config, speculative):
        return False
    draft = getattr(speculative, "draft_model_config", None)
    dense = DENSE_DRAFTS.intersection(getattr(draft, "architectures", None) or ())
    return _is_mixture(draft) and not dense and not is_block(config, speculative)


def step_has_experts(config: TreeConfig, vllm_config: Any) -> bool:
    """Whether rows of a step read experts, the target's or the draft's."""
    speculative = vllm_config.speculative_config
    return _is_mixture(target_of(vllm_config)) or draft_has_experts(config, speculative)


def _is_mixture(model: Any) -> bool:
    return bool(getattr(model, "is_moe", False))
