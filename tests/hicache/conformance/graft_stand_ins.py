"""Stand-ins that vLLM's own test files import where they name a class of vLLM's.

This file is copied beside them; see ``test_conformance.py``.
"""

import copy
import functools
from typing import Any
from unittest.mock import Mock

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.plugins import load_general_plugins
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from vllm_graft.hicache.connector import HiCacheConnector
from vllm_graft.hicache.planning.request_state import Chosen
from vllm_graft.seams import compare

EXTRA = {"host_bytes": 64 << 20}

# Each connector would compare the same rows with the same files, which takes half a second.
compare.check_seams = functools.cache(compare.check_seams)

# An engine does this before it looks a connector's name up.
load_general_plugins()
for name in ("SeededConnector", "BrokenConnector"):
    KVConnectorFactory.register_connector(name, __name__, name)


class SeededConnector(HiCacheConnector):
    """Our connector, but the host holds whatever a test declares to be there.

    vLLM's tests say with ``do_remote_prefill`` that another node holds the KV of a prompt, its last
    tokens included. Here the pages of the prompt are put into the host index at that moment; what
    happens then is the connector's own.
    """

    def get_num_new_matched_tokens(
        self, request: Any, num_computed: int
    ) -> tuple[int | None, bool]:
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed)
        if not (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return found
        state = self.scheduler.state_of(request)
        keys = [key for keys in state.keys.values() for key in keys]
        index = self.scheduler.index
        pages = index.reserve([key for key in keys if index.get(key) is None])
        if pages is None:
            raise AssertionError("the host pool of the test is too small")
        index.commit(pages)
        state.chosen = Chosen(num_computed, request.num_prompt_tokens, layerwise=False)
        return request.num_prompt_tokens - num_computed, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external)
        if request.kv_transfer_params:
            request.kv_transfer_params["do_remote_prefill"] = False


class BrokenConnector(SeededConnector):
    """A connector that says that loads are part of the step, but does them outside.

    Tests have to notice.
    """

    def get_num_new_matched_tokens(
        self, request: Any, num_computed: int
    ) -> tuple[int | None, bool]:
        tokens, _ = super().get_num_new_matched_tokens(request, num_computed)
        return tokens, False


def cache_config(num_blocks: int = 8) -> KVCacheConfig:
    """Make one group of one layer, because the connector refuses a model without KV."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    return KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer.0"], spec)])


class RecordedConnector(HiCacheConnector):
    """Ours, for a test that calls a rank's method on the scheduler's side."""

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if self.role is KVConnectorRole.WORKER:
            super().handle_preemptions(kv_connector_metadata)


def inside(config: VllmConfig, role: KVConnectorRole, _: KVCacheConfig) -> HiCacheConnector:
    """Make ours for a test that wraps it, with options of the wrapper and without any group."""
    config = copy.deepcopy(config)
    if config.kv_transfer_config is None:
        raise AssertionError("the test gave no kv_transfer_config")
    config.kv_transfer_config.kv_connector_extra_config = EXTRA
    connector = RecordedConnector(config, role, cache_config())
    if role is KVConnectorRole.WORKER:
        connector.register_kv_caches({"layer.0": torch.zeros(8, 2, 16, 8)})
    return connector


def spy() -> Mock:
    """Make a mock that records calls and passes them on to ours, unless the test sets a result."""
    from tests.v1.kv_connector.unit.utils import create_vllm_config

    role = KVConnectorRole.SCHEDULER
    return Mock(wraps=HiCacheConnector(create_vllm_config(), role, cache_config(10_000)))
