"""Which drafter of the hook ``graft_drafters`` an engine takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.options import flag
from vllm_graft.hooks import entries, manager
from vllm_graft.hooks.manager import OURS, Offer

if TYPE_CHECKING:
    from vllm_graft.spec_decode.config.tree_config import TreeConfig

HOOK = "graft_drafters"


def methods() -> list[str]:
    """Methods of the speculative config that some drafter grows trees for."""
    found = [method for offer in manager.manager().offers(HOOK) for method in _methods(offer)]
    return sorted(set(found))


def chosen(config: TreeConfig, method: str) -> Offer:
    """The drafter that the configuration names, or the one for the method.

    An entry with the name of ours replaces it. Where none of ours drafts with the method, a third
    party's is taken if there is just one.

    Raises:
        ConfigError: if there is none or more than one, or the named one drafts with other methods.
    """
    name = config.drafter or _name_for(method)
    offer = manager.manager().choose(HOOK, name, flag("tree", "drafter"))
    if (known := _methods(offer)) and method not in known:
        raise ConfigError(
            f"{flag('tree', 'drafter')}={name} ({offer.provider}) drafts with "
            f"{' or '.join(map(repr, known))}, but speculative_config.method is {method!r}: "
            "change one of them."
        )
    return offer


def _name_for(method: str) -> str:
    offers = [offer for offer in manager.manager().offers(HOOK) if method in _methods(offer)]
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
