"""The nonce: a random text that only the processes of one engine know.

The host memory is a file that these processes find by its name, so the name must be unique to their
engine. The nonce is in the extra config of each of our connectors. vLLM makes a configuration in
one process and pickles it to all others, so all processes get the same nonces. Two connectors below
a ``MultiConnector`` need two regions, so each has its own.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.options import MAX_DEPTH
from vllm_graft.hicache.config.connector_options import (
    CONNECTOR,
    EXTRA,
    MODULE,
    MULTI_CONNECTOR,
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
    """Give each of our connectors a nonce, unless it has one.

    vLLM derives configurations from others, also in the engine's processes. Existing nonces stay,
    so that all processes agree. A user may give one ``KVTransferConfig`` to two engines, which must
    not share a nonce. So that object stays unchanged, and ``vllm_config`` gets a copy of it.
    """
    given: Any = vllm_config.kv_transfer_config
    if given is None:
        return
    names = ("kv_connector", "kv_connector_module_path", EXTRA)
    transfer = {name: getattr(given, name) for name in names}
    stamped = _stamped(transfer, MAX_DEPTH)
    if stamped is not transfer:
        # The attribute is set on a copy, because a new object would be completed and checked again.
        found = copy.copy(given)
        found.kv_connector_extra_config = stamped[EXTRA]
        vllm_config.kv_transfer_config = found


def _stamped(transfer: Any, depth: int) -> Any:
    """A connector's configuration with the missing nonces; the same object if none is missing.

    Malformed configurations are returned unchanged, because other checks refuse them.
    """
    extra = transfer.get(EXTRA, {}) if isinstance(transfer, Mapping) else None
    if not isinstance(extra, Mapping):
        return transfer
    name, module = transfer.get("kv_connector"), transfer.get("kv_connector_module_path")
    if name == CONNECTOR and module in (None, MODULE):
        if KEY in extra and nonce_of(extra) is None:
            raise ConfigError(f"{option_flag(KEY)} is set by vllm-graft itself: remove it.")
        found = extra if KEY in extra else {**extra, KEY: Nonce(secrets.token_hex(16))}
    elif name == MULTI_CONNECTOR and module is None and depth:
        found = _with_stamped_children(extra, depth - 1)
    else:
        return transfer
    return transfer if found is extra else {**transfer, EXTRA: found}


def _with_stamped_children(extra: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
    children = extra.get("connectors")
    if not isinstance(children, (list, tuple)):
        return extra
    stamped = [_stamped(child, depth) for child in children]
    if all(one is other for one, other in zip(stamped, children)):
        return extra
    return {**extra, "connectors": stamped}
