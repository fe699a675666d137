"""Stand-ins that vLLM's own test files import where they name a class of vLLM's.

This file is copied beside them; see ``test_conformance.py``.
"""

import contextlib
import copy
import io
import itertools
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.plugins import load_general_plugins
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import Medium

from vllm_graft.hicache.connector import HiCacheConnector
from vllm_graft.hicache.native.native_tier import SegmentsTier, page_key
from vllm_graft.hicache.planning.request_state import Chosen

EXTRA = {"host_bytes": 64 << 20}

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


class FsTier(SegmentsTier):
    """Our tier, built as vLLM's tests build their file-system tier.

    They look chunks up through a thread and ask it whether it is done; ours answers at once.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        root_dir: str,
        **options: Any,
    ) -> None:
        options = {"max_bytes": "1GiB", "segment_bytes": "64MiB", "weights": "test", **options}
        super().__init__(offloading_spec, primary_kv_view, tier_type, root_dir, **options)
        answered = SimpleNamespace(empty=lambda: False)
        self._lookup_manager = SimpleNamespace(_pending_results=answered, _lookup_batch=[])
        self.file_mapper = SimpleNamespace(
            base_path=self.store._directory.path, get_file_name=lambda key: ChunkFile(self, key)
        )

    # Our tier has no such state.
    _use_o_direct = False
    _store_job_keys: ClassVar[dict[int, Any]] = {}

    @property
    def _pool(self) -> Any:
        def waiting(pool: ThreadPoolExecutor) -> int:
            # The queue of a pool that was shut down holds one mark for its threads.
            return pool._work_queue.qsize() - int(pool._shutdown)

        return SimpleNamespace(
            _load_q=range(waiting(self._readers)),
            _store_q=range(waiting(self._writers)),
            _threads=[*self._readers._threads, *self._writers._threads],
        )


class ChunkFile:
    """A record in a segment of ours, where vLLM's tier has a file of a chunk."""

    def __init__(self, tier: FsTier, key: Any) -> None:
        self._store, self._key = tier.store, page_key(key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChunkFile) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def exists(self) -> bool:
        return self._store.contains([self._key]) == [True]

    @contextlib.contextmanager
    def spoiled(self) -> Iterator[io.BytesIO]:
        """Write other bytes into the middle of the record on the disk."""
        segment, entry = self._store._space.index[self._key]
        os.pwrite(segment._fd, b"x" * 10, entry.offset + entry.length // 2)
        yield io.BytesIO()

    def refuse_writes(self, monkeypatch: Any) -> None:
        """Let writes of this chunk alone fail."""
        write = self._store.write
        monkeypatch.setattr(
            self._store, "write", lambda key, page: key != self._key and write(key, page)
        )


class ExampleTier(SegmentsTier):
    """Our tier, built and looked into as vLLM's tests do with their example of a tier in memory.

    Its jobs are done when they are submitted, as in the example.
    """

    # These names are the example tier's.
    medium = Medium.CPU

    _count = itertools.count()
    _folder = tempfile.TemporaryDirectory()

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **_: Any
    ) -> None:
        path = f"{self._folder.name}/{next(self._count)}"
        options = {"max_bytes": "4MiB", "segment_bytes": "1MiB", "weights": "test"}
        super().__init__(offloading_spec, primary_kv_view, tier_type, path, **options)
        self.chunks = _Chunks(self)

    @property
    def completed_jobs(self) -> list[Any]:
        return self._finished

    def submit_store(self, job_metadata: Any) -> None:
        super().submit_store(job_metadata)
        SegmentsTier.drain_jobs(self)

    def submit_load(self, job_metadata: Any) -> None:
        super().submit_load(job_metadata)
        SegmentsTier.drain_jobs(self)

    def get_num_chunks(self) -> int:
        return self.store.stats()["pages"]


class _Chunks:
    """A mapping of chunks: ``tier.chunks[key] = True`` puts a chunk there."""

    def __init__(self, tier: ExampleTier) -> None:
        self._tier = tier

    def __setitem__(self, key: Any, there: bool) -> None:
        page = memoryview(bytes(self._tier.block_size_bytes))
        if not there or not self._tier.store.write(page_key(key), page):
            raise AssertionError("the store did not take the chunk")
