"""The drafter that an engine takes, and facts that configurations tell of its draft."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.options import flag, target_of
from vllm_graft.hooks import entries, manager
from vllm_graft.hooks.manager import OURS, Offer
from vllm_graft.spec_decode.config.tree_config import TreeConfig

HOOK = "graft_drafters"


def methods(*, measured: bool = False) -> list[str]:
    """Methods of the speculative config that some drafter grows trees for, or only those whose
    trees were measured on a GPU, so that presets may ask for them."""
    offered = [offer.entry for offer in manager.manager().offers(HOOK)]
    drafters = [each for each in offered if isinstance(each, entries.Drafter)]
    kept = [each for each in drafters if not (measured and each.unmeasured)]
    return sorted({method for each in kept for method in each.methods})


def chosen(config: TreeConfig, speculative: Any) -> Offer:
    """The drafter that the configuration names, or the one for the method and the draft.

    An entry with the name of ours replaces it. Where none of ours drafts with the method, a third
    party's is taken if there is just one. A drafter that names the draft's architecture goes before
    one that names none. Raises `ConfigError` if there is none or more than one, or the named one
    drafts with other methods or architectures."""
    draft = getattr(speculative, "draft_model_config", None)
    method, architectures = speculative.method, set(getattr(draft, "architectures", None) or ())
    name = config.drafter or _name_for(method, architectures)
    offer = manager.manager().choose(HOOK, name, flag("tree", "drafter"))
    if (known := _methods(offer)) and method not in known:
        raise ConfigError(
            f"{flag('tree', 'drafter')}={name} ({offer.provider}) drafts with "
            f"{' or '.join(map(repr, known))}, but speculative_config.method is {method!r}: "
            "change one of them."
        )
    if (only := _only(offer)) and not architectures.intersection(only):
        raise ConfigError(
            f"{flag('tree', 'drafter')}={name} ({offer.provider}) drafts with "
            f"{' or '.join(only)}, but the draft's architecture is "
            f"{' or '.join(sorted(architectures)) or 'unknown'}: drop the key."
        )
    return offer


def drafter_of(config: TreeConfig, speculative: Any) -> entries.Drafter | None:
    """The chosen drafter; None if none can be chosen, which is said where it is described."""
    try:
        entry = chosen(config, speculative).entry
    except ConfigError:
        return None
    return entry if isinstance(entry, entries.Drafter) else None


def is_block(config: TreeConfig, speculative: Any) -> bool:
    """Whether the chosen drafter drafts all depths in one pass; false if none can be chosen."""
    entry = drafter_of(config, speculative)
    return entry is not None and entry.block


def has_model(config: TreeConfig, speculative: Any) -> bool:
    """Whether the chosen drafter has a draft model; true if none can be chosen. Without one, vLLM
    has the target's configuration in the place of the draft's."""
    entry = drafter_of(config, speculative)
    return entry is None or entry.has_model


def grows_by_levels(config: TreeConfig, speculative: Any) -> bool:
    """Whether the chosen drafter runs a draft model once per level; false if none can be chosen."""
    entry = drafter_of(config, speculative)
    return entry is not None and entry.has_model and not entry.block


def _name_for(method: str, architectures: set[str]) -> str:
    offers = [offer for offer in manager.manager().offers(HOOK) if method in _methods(offer)]
    for_draft = [offer for offer in offers if architectures.intersection(_only(offer))]
    offers = for_draft or [offer for offer in offers if not _only(offer)]
    ours = [offer for offer in offers if offer.provider == OURS]
    names = sorted({offer.entry.name for offer in ours or offers})
    if len(names) != 1:
        raise ConfigError(
            f"{flag('tree', 'drafter')} is not given, and {len(names)} drafters "
            f"({', '.join(names) or 'none'}) grow trees for speculative_config.method {method!r}: "
            "name one."
        )
    return names[0]


def _methods(offer: Offer) -> tuple[str, ...]:
    return offer.entry.methods if isinstance(offer.entry, entries.Drafter) else ()


def _only(offer: Offer) -> tuple[str, ...]:
    return offer.entry.architectures if isinstance(offer.entry, entries.Drafter) else ()


CANDIDATE_KEYS = ("selector_top_k", "lilicorr_candidate_topk")
"""Keys of a draft's ``dflash_config`` that say how many candidates a position has."""

_ASSISTANTS = ("gemma4_mtp",)
"""Model types of drafts whose layers read the target's K/V and have none of their own."""

_REFINED = "xpress"
"""The drafter whose drafts have a refiner."""

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
    """Whether the draft of vLLM's speculative config is an XPress, by its architecture."""
    draft = getattr(speculative, "draft_model_config", None)
    architectures = set(getattr(draft, "architectures", None) or ())
    offers = manager.manager().offers(HOOK)
    known = [name for each in offers if each.entry.name == _REFINED for name in _only(each)]
    return not architectures.isdisjoint(known)


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
    """Positions that predict a token in the longest block of an engine. The refiner of an XPress
    reads whole blocks. No block has more positions than a tree has nodes, as vLLM keeps slots of
    the K/V cache for so many."""
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
"""Architectures of drafts without experts, whose configurations, often the target's, count some."""


def draft_has_experts(config: TreeConfig, speculative: Any) -> bool:
    """Whether rows of a level read experts of the draft's. An MTP module says so in the target's
    own configuration. EAGLE-3 heads are dense whatever they were made for. Block drafters have no
    levels, and n-grams no draft model."""
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
