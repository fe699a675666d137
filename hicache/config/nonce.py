"""The nonce: a random text that only the processes of one engine know.

The host memory is a file that these processes find by its name, so the name must be unique to their
engine. The nonce is in the extra config of each of our connectors. vLLM makes a configuration in
one process and pickles it to all others, so all processes get the same nonces. Two connectors below
a ``MultiConnector`` need two regions, so each has its own.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_graft.base.errors import ConfigError
from vllm_graft.hicache.config.connector_options import (
    EXTRA,
    all_connectors,
    is_ours,
    option_flag,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "_graft_nonce"
"""Key of the extra config. Neither vLLM's hash nor our namespace covers the extra config."""

REGION_PREFIX = "vllm_graft_region_"
"""Prefix of the name of an engine's host memory file."""


class Nonce(str):
    """A nonce. Its type, which survives pickling, tells it from a text that a user has written."""

    __slots__ = ()


def without_nonce(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The extra config without nonces. A value that a user gave the nonce's key stays."""
    return {key: value for key, value in extra.items() if not isinstance(value, Nonce)}


def nonce_of(extra: Mapping[str, Any]) -> Nonce | None:
    """The nonce in a connector's extra config; None if there is none."""
    found = extra.get(KEY)
    return found if isinstance(found, Nonce) else None


def stamp(vllm_config: VllmConfig) -> None:
    """Give each of our connectors a nonce, unless it has one. vLLM derives configurations from
    others, also in the engine's processes. Existing nonces stay, so that all processes agree. A
    user may give one ``KVTransferConfig`` to two engines, which must not share a nonce. So that
    object stays unchanged, and ``vllm_config`` gets a copy of it."""
    given: Any = vllm_config.kv_transfer_config
    ours = [each for _, each in all_connectors(given) if is_ours(each)]
    if any(KEY in extra and nonce_of(extra) is None for extra in _extras(ours)):
        raise ConfigError(f"{option_flag(KEY)} is set by vllm-graft itself: remove it.")
    if all(KEY in extra for extra in _extras(ours)):
        return
    # The attribute is set on a copy, because a new object would be completed and checked again.
    found = copy.copy(given)
    found.kv_connector_extra_config = copy.deepcopy(given.kv_connector_extra_config)
    vllm_config.kv_transfer_config = found
    for extra in _extras(each for _, each in all_connectors(found) if is_ours(each)):
        extra.setdefault(KEY, Nonce(secrets.token_hex(16)))


def _extras(connectors: Iterable[Mapping[Any, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the extra configs that are mappings; other checks refuse the others."""
    for each in connectors:
        if isinstance(extra := each.get(EXTRA), dict):
            yield extra
