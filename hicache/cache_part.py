"""The part of the host KV cache: how vLLM comes to know our connector, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from vllm_graft.base.log import warning_once
from vllm_graft.base.refusal import Refusal, sentences
from vllm_graft.hicache.cache_refusals import REFUSALS, Asked, parse_connectors
from vllm_graft.hicache.config.connector_options import FLAG
from vllm_graft.hicache.config.stamp import stamp
from vllm_graft.hooks import manager
from vllm_graft.seams.post_import import after_import

_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


class CachePart:
    """The host KV cache, a KV connector; see `vllm_graft.base.part.Part`.

    Its keys stand in ``--kv-transfer-config``. vLLM builds the connector by its name, in the
    scheduler and in each worker, or fails: so there is nothing to verify.
    """

    name = "hicache"
    asks_for = "a host KV cache"
    flag = FLAG
    refusals: Sequence[Refusal] = REFUSALS

    def install(self) -> None:
        """Wait for vLLM's factory; again does nothing more."""
        after_import(_FACTORY, register_connectors)

    def section(self, vllm_config: Any) -> Asked | None:
        """Each of our connectors that the configuration names; None where it names none."""
        return parse_connectors(vllm_config) or None

    def fill_in(self, asked: Asked, vllm_config: Any) -> None:
        """Give each connector the nonce by which this engine's processes find its host memory."""
        stamp(vllm_config)

    def refuses(self, asked: Asked, vllm_config: Any) -> Iterator[str]:
        """What can be known before a model loads; raises a ConfigError with the key's own flag."""
        yield from sentences(REFUSALS, asked, vllm_config)

    def describe(self, asked: Asked, vllm_config: Any) -> str:
        """Sizes and storage of each connector."""
        return "; ".join(
            f"host KV cache of {int(config.host_bytes)} bytes"
            + (f", storage {config.storage['backend']}" if config.storage else "")
            for _, config in asked
        )

    def verify(self, asked: Asked, worker: Any, vllm_config: Any) -> None:
        """Nothing: without the connector, the worker has not started."""


def register_connectors(module: ModuleType) -> None:
    """Make KV connectors of ``graft_kv_connectors`` known to vLLM by their names."""
    factory = module.KVConnectorFactory
    for offer in manager.manager().offers("graft_kv_connectors"):
        name, load = offer.entry.name, offer.entry.load
        if not isinstance(load, str):
            warning_once(f"KV connector {name!r}: load must read 'package.module:Class'")
        elif name not in factory._registry:
            path, _, attribute = load.partition(":")
            factory.register_connector(name, path, attribute)


CACHE = CachePart()
