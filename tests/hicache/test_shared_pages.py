"""Ranks that hold the same K/V (MLA) keep a page once: each writes a share, and all read it."""

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

from tests.support.answers import near_ties
from tests.support.engines import rank_answers
from tests.support.engines.cache_engines import prompts, transfer
from tests.support.engines.gpu_engines import two_rank_options
from tests.support.engines.pairs import Request
from tests.support.engines.rank_answers import Questions
from tests.support.models.latent_models import write_deepseek
from vllm_graft.hicache.config.cache_config import HiCacheConfig
from vllm_graft.hicache.config.nonce import KEY, Nonce
from vllm_graft.hicache.host import region
from vllm_graft.hicache.host.controller import HybridCacheController
from vllm_graft.hicache.host.eviction import LruPolicy
from vllm_graft.hicache.host.index import HostIndex
from vllm_graft.hicache.host.pool import HostPool
from vllm_graft.hicache.host.shared_index import SharedIndex
from vllm_graft.hicache.messages.operation import CacheOperation, Direction, PoolTransfer, share_of
from vllm_graft.hicache.messages.step_metadata import HiCacheMetadata, HiCacheReport
from vllm_graft.hicache.pages.geometry import Geometry
from vllm_graft.hicache.pages.groups import Group, HitPolicy
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.pages.pool_shape import PAGE, PoolShape, Sharing
from vllm_graft.hicache.rank.worker import HiCacheWorker

Pairs = dict[int, list[tuple[int, int]]]


def pairs(operation: CacheOperation | None) -> Pairs:
    transfers = operation.transfers if operation is not None else []
    return {part.group: list(zip(part.host_indices, part.device_indices)) for part in transfers}


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 8), st.integers(0, 99))
def test_shares_are_the_whole_and_about_as_large(sizes: list[int], ranks: int, job: int) -> None:
    transfers = [
        PoolTransfer(group, list(range(size)), list(range(100, 100 + size)))
        for group, size in enumerate(sizes)
    ]
    operation = CacheOperation([job, job + 1], Direction.STORE, transfers)
    shares = [share_of(operation, rank, ranks) for rank in range(ranks)]
    assert all(share.ids == operation.ids for share in shares if share is not None)
    for group, whole in pairs(operation).items():
        found = [pairs(share).get(group, []) for share in shares]
        assert sorted(pair for each in found for pair in each) == whole
        assert max(map(len, found)) - min(map(len, found)) <= 1
        # Pages that follow each other stay together.
        assert all(each == whole[each[0][0] : each[0][0] + len(each)] for each in found if each)


def test_single_pages_fall_to_each_rank_in_turn() -> None:
    def writer(job: int) -> int:
        one = CacheOperation([job], Direction.STORE, [PoolTransfer(0, [3], [4])])
        [rank] = [rank for rank in range(4) if share_of(one, rank, 4) is not None]
        return rank

    assert sorted(map(writer, range(4))) == [0, 1, 2, 3]


SLOTS, BLOCKS, RANKS = 6, 9, 4
GROUP = Group(0, 16, 1, HitPolicy.ALL_PAGES, 0, PAGE, ("layers.0",))


def geometry(name: str | None, replicas: int) -> Geometry:
    shape = PoolShape(SLOTS, PAGE, RANKS // replicas)
    return Geometry((GROUP,), shape, name, RANKS, replicas, False, frozenset())


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_ranks_allocate_all_memory_between_them(replicas: int) -> None:
    found = geometry(None, replicas)
    parts = [found.memory_of(rank) for rank in range(RANKS)]
    assert [place for part in parts for place in part] == list(range(found.shape.num_bytes))
    assert all(part.start % PAGE == 0 for part in parts)


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 2), (4, 2), (2, 1)])
def test_ranks_that_vllm_says_hold_the_same_have_one_shard(ranks: int, replicas: int) -> None:
    """VLLM says so of latents; a page that is kept once leaves room for as many more."""
    latents = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float16)
    group = KVCacheGroupSpec(["layers.0", "layers.1"], latents)
    found = KVCacheConfig(8, [], [group], kv_tp_replicas=replicas)
    parallel = SimpleNamespace(world_size=ranks, data_parallel_index=0)
    extra = {KEY: Nonce("of this engine")}
    transfer = SimpleNamespace(
        engine_id="e", kv_connector_extra_config=extra, kv_load_failure_policy="fail"
    )
    engine: Any = SimpleNamespace(parallel_config=parallel, kv_transfer_config=transfer)
    made = Geometry.of(HiCacheConfig.parse({"host_bytes": "1MiB"}), engine, found)
    page = 2 * 16 * 576 * 2
    assert made.groups[0].page_bytes == page
    assert (made.replicas, made.shape.num_shards) == (replicas, ranks // replicas)
    assert [made.shard_of(rank) for rank in range(ranks)] == [
        rank // replicas for rank in range(ranks)
    ]
    assert made.shape.num_slots == (1 << 20) * replicas // (made.shape.slot_bytes * ranks)


class Engine:
    """Ranks of one engine, which map a region; pairs of them hold the same K/V."""

    def __init__(self, name: str, sharing: Sharing | None = None) -> None:
        self.geometry = replace(geometry(name, replicas=2), sharing=sharing)
        self.ranks = [HiCacheWorker(self.geometry, rank, BLOCKS) for rank in range(RANKS)]
        self.index: HostIndex = HostIndex(SLOTS, LruPolicy(SLOTS), {0: PAGE})
        if sharing is not None:
            pool = HostPool(self.geometry.shape, name, sharing=sharing)
            self.index = SharedIndex(pool, bytes(16), {0: PAGE})
        self.controller = HybridCacheController((GROUP,), self.index, RANKS)
        self.caches = []
        for rank, worker in enumerate(self.ranks):
            numbers = torch.Generator().manual_seed(self.geometry.shard_of(rank))
            cache = torch.randint(0, 256, (BLOCKS, PAGE), generator=numbers).to(torch.uint8)
            self.caches.append(cache)
            worker.register({"layers.0": cache}, ())

    def store(self, keys: Sequence[PageKey], forgets: int | None = None) -> None:
        operation = self.controller.store([(key, 1 + place) for place, key in enumerate(keys)])
        assert operation is not None
        for rank, worker in enumerate(self.ranks):
            with mock.patch("ctypes.memmove") if rank == forgets else contextlib.nullcontext():
                worker.store(HiCacheMetadata(stores=[operation]))

    def close(self) -> None:
        for worker in self.ranks:
            worker.close()
        self.index.close()

    def report(self, rank: int) -> None:
        self.ranks[rank].results(HiCacheMetadata())
        told = self.ranks[rank].take_report() or HiCacheReport()
        self.controller.report(told.done, told.failed)

    def loaded(self, keys: Sequence[PageKey], rank: int) -> bool:
        """Whether a rank's blocks are those of the pages after a load."""
        blocks = range(1 + len(keys), 1 + 2 * len(keys))
        operation = self.controller.load(list(zip(keys, blocks)), "a")
        assert operation is not None
        self.ranks[rank].start_loads(HiCacheMetadata(sync_loads=[operation]), hooks_run=False)
        cache = self.caches[rank]
        return torch.equal(cache[blocks.start : blocks.stop], cache[1 : 1 + len(keys)])


KEYS = [PageKey(bytes([number]) * 32, 0) for number in range(4)]


@pytest.fixture
def engine() -> Iterator[Engine]:
    name = region.PREFIX + secrets.token_hex(16)
    found = Engine(name)
    yield found
    found.close()
    region.remove(name)


@pytest.mark.parametrize("count", [1, 4])
def test_a_page_is_read_once_every_rank_has_reported(engine: Engine, count: int) -> None:
    """A rank that is gone reports no more."""
    keys = KEYS[:count]
    engine.store(keys)
    for rank in range(RANKS):
        assert not any(map(engine.index.has, keys))
        assert engine.controller.load([(key, 0) for key in keys], "a") is None
        engine.report(rank)
    assert all(map(engine.index.has, keys))
    assert all(engine.loaded(keys, rank) for rank in range(RANKS))
    written = [worker.counters().get("store_bytes", 0) for worker in engine.ranks]
    assert sum(written[:2]) == sum(written[2:]) == count * PAGE
    assert count == 1 or min(written) == count * PAGE // 2


def test_ranks_of_two_engines_share_pages() -> None:
    """A page is the other engine's once every rank of the first has reported its share."""
    name = region.PREFIX + secrets.token_hex(16)
    one, other = (Engine(name, Sharing(bytes([number]) * 16, 1)) for number in (1, 2))
    one.store(KEYS)
    for rank in range(RANKS):
        other.index.look()
        assert other.controller.load([(key, 0) for key in KEYS], "a") is None
        one.report(rank)
    other.index.look()
    assert all(other.loaded(KEYS, rank) for rank in range(RANKS))
    one.close()
    assert other.index.counts()["sharing_engines"] == 2
    assert other.controller.load([(key, 0) for key in KEYS], "b") is not None
    other.close()
    assert not (region.SHM / name).exists()


def test_a_share_that_fails_leaves_no_page(engine: Engine) -> None:
    with mock.patch.object(engine.ranks[1].engine, "_copies", side_effect=OSError("injected")):
        engine.store(KEYS)
    for rank in range(RANKS):
        engine.report(rank)
    assert not any(map(engine.index.has, KEYS))
    assert engine.index.num_free == SLOTS


def test_a_share_that_is_missing_would_be_seen(engine: Engine) -> None:
    """The negative control: rank 1 reports what it has not written, and its partner reads it."""
    engine.store(KEYS, forgets=1)
    for rank in range(RANKS):
        engine.report(rank)
    assert [engine.loaded(KEYS, rank) for rank in range(RANKS)] == [False, False, True, True]


ON_CPU: dict[str, Any] = {
    "attention_backend": "CPU_MLA",
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "disable_log_stats": False,
}
ON_CUDA: dict[str, Any] = {
    **two_rank_options(0),
    "attention_backend": "TRITON_MLA",
    "dtype": "float16",
    "block_size": 64,
}
TWO_CARDS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("options", "near"),
    [
        pytest.param(ON_CPU, 0.0, marks=pytest.mark.nightly),
        pytest.param(ON_CUDA, 0.05, marks=[pytest.mark.gpu, TWO_CARDS]),
    ],
)
def test_two_ranks_of_latents_keep_a_page_once(
    options: dict[str, Any], near: float, tmp_path: Path
) -> None:
    """The second round loads what both ranks have written; the host has room for whole pages."""
    engine = {
        "model": str(write_deepseek(tmp_path / "target", heads=16, layers=2)),
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "skip_tokenizer_init": True,
        "kv_transfer_config": transfer(load="async"),
        **options,
    }
    lengths = [200, 100, 65]
    params = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 5}
    requests = [Request(prompt, params) for prompt in prompts(3, *lengths)]
    questions = Questions(engine, requests, rounds=2)
    found = rank_answers.ask(tmp_path, questions, cuda=options is ON_CUDA)
    computed, loaded = (
        [near_ties.Answer(each.tokens[0], each.logprobs[0]) for each in answers]
        for answers in found.rounds
    )
    near_ties.check_near_ties(loaded, computed, near)
    block = options["block_size"]
    assert [each.cached for each in found.rounds[1]] == [at // block * block for at in lengths]
    first, second = (rank["counters"]["hicache"] for rank in found.ranks)
    assert first["slots"] == 2**25 // first["slot_bytes"]
    assert first["ranks_of_a_page"] == second["ranks_of_a_page"] == 2
    assert 0 < first["store_bytes"] < 2 * second["store_bytes"] < 4 * first["store_bytes"]
    assert first["load_bytes"] == second["load_bytes"] > 0
