"""Engines beside and after one another: nobody reads another's K/V."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.cache_engines import generate, metrics, prompts, stored, transfer
from tests.support.engines.pairs import Pair
from tests.support.engines.shipped_pair import SHIPPED
from vllm_graft.testing import cpu_engine, model_runner, write_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.usefixtures("reads_pay")]

PROMPTS = prompts(3, 200, 100, 65, 33)
CACHED = [192, 96, 64, 32]
NONE = [0, 0, 0, 0]


def _reload(llm: Any, weights: Path, **reset: bool) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(weights)})
    assert llm.reset_prefix_cache(**reset)


def test_weights_that_are_reloaded_while_serving(llama: Path, tmp_path: Path) -> None:
    """The files' weights find their own pages after a restart, and never those of others."""
    other = write_llama(tmp_path / "other", seed=7)
    with cpu_engine(llama) as llm:
        ours = generate(llm, PROMPTS)[0]
        _reload(llm, other)
        theirs = generate(llm, PROMPTS)[0]
    assert all(one != another for one, another in zip(ours, theirs))
    options = transfer(**stored(tmp_path / "store"))
    with cpu_engine(llama, kv_transfer_config=options) as llm:
        assert generate(llm, PROMPTS) == (ours, NONE)
        # Host memory forgets the old weights' pages although nobody resets it.
        _reload(llm, other)
        assert generate(llm, PROMPTS) == (theirs, NONE)
        assert llm.reset_prefix_cache()
        assert generate(llm, PROMPTS) == (theirs, CACHED)
    with cpu_engine(llama, kv_transfer_config=options) as llm:
        # What was stored before the change is there, and nothing else.
        assert generate(llm, PROMPTS) == (ours, CACHED)
        assert metrics(llm)["hit_tokens_storage"] == sum(CACHED)
        _reload(llm, other, reset_connector=True)
        assert generate(llm, PROMPTS) == (theirs, NONE)
    with cpu_engine(llama, kv_transfer_config=options) as llm:
        assert generate(llm, PROMPTS) == (ours, NONE)
        assert not metrics(llm).get("hit_tokens_storage")


def test_chains_and_trees_lay_keys_out_otherwise_on_a_cpu(tmp_path: Path) -> None:
    """A store that vLLM's chain has filled is read by a chain and not by a tree."""
    pair = Pair.load(SHIPPED)
    batch, options = pair.prompts[:2], transfer(**stored(tmp_path))
    with pair.engine(chain=4, kv_transfer_config=options) as llm:
        tokens, _ = generate(llm, batch)
    with pair.engine(nodes=9, topk=3, kv_transfer_config=options) as llm:
        assert generate(llm, batch)[0] == tokens
        assert not metrics(llm).get("hit_tokens_storage")
    with pair.engine(chain=4, kv_transfer_config=options) as llm:
        assert generate(llm, batch)[0] == tokens
        assert metrics(llm)["hit_tokens_storage"] > 0


def _two(folder: Path) -> dict[str, Any]:
    """Configure host memory of 32 and 64 pages, both with storage, so that regions are shared."""
    children = []
    for number, size in enumerate(("1MiB", "2MiB")):
        options = stored(folder / str(number), "8MiB") | {"prefetch": {}}
        given = transfer(host_bytes=size, **options)
        children.append({key: given[key] for key in given if key != "kv_load_failure_policy"})
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }


def test_each_has_host_memory_of_its_own(llama: Path, tmp_path: Path) -> None:
    """Both have the same id, which once gave both the same file, with the second one's size."""
    options: dict[str, Any] = {"num_gpu_blocks_override": 24, "enable_prefix_caching": True}
    batches = [prompts(seed, 200, 150, 90, 170) for seed in range(8)]
    with cpu_engine(llama, **options) as llm:
        expected = [generate(llm, batch, 4)[0] for batch in batches]
    with cpu_engine(llama, kv_transfer_config=_two(tmp_path), **options) as llm:
        cached = 0
        for _ in range(2):
            for batch, tokens in zip(batches, expected):
                found, hits = generate(llm, batch, 4)
                assert found == tokens
                cached += sum(hits)
        children = model_runner(llm).kv_connector.kv_connector.sub_connectors
        pools = [child.worker._pool for child in children]
        assert [pool.shape.num_slots for pool in pools] == [32, 64]
        assert len({os.fstat(pool._fd).st_ino for pool in pools}) == 2
        # Pages that no host memory holds come from the storage of the first child that has them.
        assert cached > 1000, cached
