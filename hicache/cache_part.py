"""The part ``hicache``: it registers our connector with vLLM, and refuses what cannot work."""

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from vllm_graft.base.decision import Preset
from vllm_graft.base.log import warning_once
from vllm_graft.base.part import Offer, Part
from vllm_graft.base.refusal import Refusal
from vllm_graft.hicache.cache_refusals import REFUSALS, Asked, check_names, parse_connectors
from vllm_graft.hicache.config.connector_options import CONNECTOR, FLAG
from vllm_graft.hicache.config.nonce import stamp
from vllm_graft.hicache.host import region
from vllm_graft.hicache.messages.cache_metrics import METRICS
from vllm_graft.hicache.pages import engine_core
from vllm_graft.hooks import manager
from vllm_graft.seams.post_import import after_import

_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"

NOT_BY_PRESET = (
    "Only you can say how much of this machine's memory it may take: add --kv-transfer-config "
    f'\'{{"kv_connector": "{CONNECTOR}", "kv_role": "kv_both", '
    '"kv_connector_extra_config": {"host_bytes": "64GiB"}}\'.'
)


class CachePart(Part):
    """The host KV cache, which is a KV connector. Its keys are in ``--kv-transfer-config``. vLLM
    builds the connector by its name in the scheduler and in each worker, and fails if it cannot. So
    there is nothing to verify."""

    name = "hicache"
    asks_for = "a host KV cache"
    flag = FLAG
    refusals: Sequence[Refusal] = REFUSALS
    metrics = METRICS

    def install(self) -> None:
        after_import(_FACTORY, register_connectors)
        after_import(engine_core.MODULE, engine_core.hook)

    def section(self, config: Any, vllm_config: Any) -> Asked | None:
        return parse_connectors(vllm_config) or None

    def automatic(self, preset: Preset, vllm_config: Any) -> Offer | str:
        """Why a preset leaves it off: nobody but the user can say how much memory it may take."""
        return NOT_BY_PRESET

    def fill_in(self, asked: Asked, vllm_config: Any) -> None:
        """Give each connector the nonce by which this engine's processes find its host memory."""
        stamp(vllm_config)
        for _, config in asked:
            if config.shared:
                from vllm_graft.hicache.pages.geometry import pool_prefix

                region.remove_at_exit(pool_prefix(config, vllm_config))

    def refuses(self, asked: Asked, vllm_config: Any) -> Iterator[str]:
        check_names(asked)
        yield from super().refuses(asked, vllm_config)

    def describe(self, asked: Asked, vllm_config: Any) -> str:
        return "; ".join(
            f"host KV cache of {config.host_bytes.human_readable()}"
            f"{', shared with other servers' if config.shared else ''}"
            + (f", storage {config.storage['backend']}" if config.storage else "")
            for _, config in asked
        )


def register_connectors(module: ModuleType) -> None:
    """Register the KV connectors of ``graft_kv_connectors`` with the factory of vLLM's module."""
    factory = module.KVConnectorFactory
    for offer in manager.manager().offers("graft_kv_connectors"):
        name, load = offer.entry.name, offer.entry.load
        if not isinstance(load, str):
            warning_once(f"KV connector {name!r}: load must read 'package.module:Class'")
        elif name not in factory._registry:
            path, _, attribute = load.partition(":")
            factory.register_connector(name, path, attribute)


CACHE = CachePart()
