"""One store, and engines whose weights or attention change: nobody reads another's K/V."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.cache_engines import generate, metrics, prompts, transfer
from tests.support.engines.pairs import Pair
from tests.support.engines.shipped_pair import SHIPPED
from vllm_graft.testing import cpu_engine, write_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.usefixtures("reads_pay")]

PROMPTS = prompts(3, 200, 100, 65, 33)
CACHED = [192, 96, 64, 32]
NONE = [0, 0, 0, 0]


def _storage(path: Path) -> dict[str, Any]:
    return transfer(
        load="async",
        storage={"backend": "segments", "path": str(path), "max_bytes": "1GiB"},
        prefetch={"policy": "wait_complete"},
    )


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
    options = _storage(tmp_path / "store")
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


@pytest.mark.slow
def test_chains_and_trees_lay_keys_out_otherwise_on_a_cpu(tmp_path: Path) -> None:
    """A store that vLLM's chain has filled is read by a chain and not by a tree."""
    pair = Pair.load(SHIPPED)
    batch, options = pair.prompts[:2], _storage(tmp_path)
    with pair.engine(chain=4, kv_transfer_config=options) as llm:
        tokens, _ = generate(llm, batch)
    with pair.engine(nodes=9, topk=3, kv_transfer_config=options) as llm:
        assert generate(llm, batch)[0] == tokens
        assert not metrics(llm).get("hit_tokens_storage")
    with pair.engine(chain=4, kv_transfer_config=options) as llm:
        assert generate(llm, batch)[0] == tokens
        assert metrics(llm)["hit_tokens_storage"] > 0
