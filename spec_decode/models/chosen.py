"""The drafter of the hook ``graft_drafters`` that an engine takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.options import flag
from vllm_graft.hooks import entries, manager
from vllm_graft.hooks.manager import OURS, Offer

if TYPE_CHECKING:
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
    one that names none.

    Raises:
        ConfigError: if there is none or more than one, or the named one drafts with other methods
            or architectures.
    """
    method, architectures = speculative.method, _architectures(speculative)
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


def _architectures(speculative: Any) -> set[str]:
    draft = getattr(speculative, "draft_model_config", None)
    return set(getattr(draft, "architectures", None) or ())


def _methods(offer: Offer) -> tuple[str, ...]:
    return offer.entry.methods if isinstance(offer.entry, entries.Drafter) else ()


def _only(offer: Offer) -> tuple[str, ...]:
    return offer.entry.architectures if isinstance(offer.entry, entries.Drafter) else ()
