"""Gives each of our connectors its nonce, where vLLM makes a configuration.

An engine's configuration is made in one process and pickled to all others, so all have the same. A
connector below ``MultiConnector`` is made from its part of the configuration, and two of them need
two regions: each gets a nonce of its own.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_graft.errors import ConfigError
from vllm_graft.hicache.config import CONNECTOR, MODULE, MULTI_CONNECTOR, flag
from vllm_graft.hicache.nonce import KEY, Nonce, nonce_of
from vllm_graft.values import MAX_DEPTH

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_EXTRA = "kv_connector_extra_config"


def stamp(vllm_config: VllmConfig) -> None:
    """Give each of our connectors a nonce; one that has its nonce keeps it.

    vLLM makes configurations from configurations, also in the engine's processes: those have to
    agree. But a ``KVTransferConfig`` that a user gives to two engines must not make them one: it
    stays as it is, and this configuration gets a copy.

    Raises:
        ConfigError: if the user has written the key.
    """
    given: Any = vllm_config.kv_transfer_config
    if given is None:
        return
    names = ("kv_connector", "kv_connector_module_path", _EXTRA)
    transfer = {name: getattr(given, name) for name in names}
    stamped = _stamped(transfer, MAX_DEPTH)
    if stamped is not transfer:
        # An attribute, not an argument: vLLM would complete and check the rest again.
        found = copy.copy(given)
        found.kv_connector_extra_config = stamped[_EXTRA]
        vllm_config.kv_transfer_config = found


def _stamped(transfer: Any, depth: int) -> Any:
    """A connector's configuration with the nonces that it lacks; the same object if it lacks none.

    What is malformed is the same as well: others say so.
    """
    extra = transfer.get(_EXTRA, {}) if isinstance(transfer, Mapping) else None
    if not isinstance(extra, Mapping):
        return transfer
    name, module = transfer.get("kv_connector"), transfer.get("kv_connector_module_path")
    if name == CONNECTOR and module in (None, MODULE):
        if KEY in extra and nonce_of(extra) is None:
            raise ConfigError(f"{flag(KEY)} is set by vllm-graft itself: remove it.")
        found = extra if KEY in extra else {**extra, KEY: Nonce(secrets.token_hex(16))}
    elif name == MULTI_CONNECTOR and module is None and depth:
        found = _with_stamped_children(extra, depth - 1)
    else:
        return transfer
    return transfer if found is extra else {**transfer, _EXTRA: found}


def _with_stamped_children(extra: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
    children = extra.get("connectors")
    if not isinstance(children, (list, tuple)):
        return extra
    stamped = [_stamped(child, depth) for child in children]
    if all(one is other for one, other in zip(stamped, children)):
        return extra
    return {**extra, "connectors": stamped}
