"""Targets with windows and chunks: answers are those of vLLM without drafts."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.answers.text_requests import in_pairs
from tests.support.engines.pairs import Answer, Pair, Request, answer_all, differing
from tests.support.models.window_models import (
    BLOCK,
    windowed_pair,
    write_gemma4,
    write_gpt_oss,
    write_llama4,
)
from vllm_graft.spec_decode.targets.dense import layer as grafted
from vllm_graft.spec_decode.targets.dense import plain_attention
from vllm_graft.spec_decode.targets.dense.layer import DenseFamily
from vllm_graft.spec_decode.trees.batch import TreeBatch
from vllm_graft.testing import greedy, spec_metrics, write_eagle3

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def windows(device: str, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Make a pair with a window in every other layer of the target, and in the draft."""
    return windowed_pair(tmp_path_factory.mktemp("windows")).on(device)


@pytest.fixture(scope="module")
def requests(windows: Pair) -> list[Request]:
    prompts, tokens = (8, 48) if windows.device == "cuda" else (2, 32)
    return in_pairs(tokens, windows.prompts[:prompts])


@pytest.fixture(scope="module")
def alone(windows: Pair, requests: list[Request]) -> list[Answer]:
    with windows.engine(block_size=BLOCK) as llm:
        return answer_all(llm, requests)


def test_trees_answer_as_the_target_alone(
    windows: Pair, requests: list[Request], alone: list[Answer]
) -> None:
    with windows.engine(nodes=15, block_size=BLOCK) as llm:
        assert differing(answer_all(llm, requests), alone) == []
        metrics = spec_metrics(llm)
    assert metrics.accepted_tokens > metrics.drafts / 2


def test_trees_without_the_window_answer_otherwise(
    windows: Pair, requests: list[Request], alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: tree rows that see every key draw other tokens."""
    monkeypatch.setattr(grafted, "window_of", lambda impl: 0)
    with windows.engine(nodes=15, block_size=BLOCK) as llm:
        assert differing(answer_all(llm, requests), alone) != []


# --- models as they are published, with windows, chunks, sinks and shared K/V -------------------


def without_sinks(patch: pytest.MonkeyPatch) -> None:
    stock = plain_attention.attended
    patch.setattr(plain_attention, "attended", lambda *args, **options: stock(*args[:6]))


def moved_twice(patch: pytest.MonkeyPatch) -> None:
    """Let both layers that read the same K/V move it."""
    stock = DenseFamily.state

    def state(self: DenseFamily, layers: Any, *args: Any) -> Any:
        own = {
            name: SimpleNamespace(kv_cache=layer.kv_cache, kv_sharing_target_layer_name=None)
            for name, layer in layers.items()
        }
        return stock(self, own, *args)

    patch.setattr(DenseFamily, "state", state)


def unchunked(patch: pytest.MonkeyPatch) -> None:
    """Let rows of trees see every key."""
    patch.setattr(
        grafted, "TreeBatch", lambda **given: TreeBatch(**{**given, "chunked": False, "window": 0})
    )


PROMPTS = [[7, 3, 9, 30, 2], [5] * 40, list(range(1, 90))]
CHUNK_PROMPTS = [[7, 3, 9, 30, 2] * 5, [5] * 60, list(range(1, 92))]
"""Trees cross the ends of chunks, at 32, 64 and 96 tokens."""


@pytest.mark.parametrize(
    ("write", "spoil"),
    [(write_gpt_oss, without_sinks), (write_gemma4, moved_twice), (write_llama4, unchunked)],
)
def test_families_with_trees_of_another_drafter(
    device: str,
    write: Callable[[Path], Path],
    spoil: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    learn: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts from a table of the target's tokens are accepted far more than a random head's.

    With chunks, on a CPU vLLM's Triton backend, interpreted, computes prompts, by sequences that
    are chunks.
    """
    chunks, on_cuda = write is write_llama4, device == "cuda"
    prompts = CHUNK_PROMPTS if chunks and not on_cuda else PROMPTS
    tokens = 40 if on_cuda else 14 if chunks else 24
    target, draft = write(tmp_path / "target"), write_eagle3(tmp_path / "draft")
    pair = Pair(str(target), str(draft), []).on(device)
    options = {"block_size": BLOCK, "skip_tokenizer_init": True, "enable_prefix_caching": False}
    with pair.engine(**options) as llm:
        expected = greedy(llm, prompts, tokens)
    learn(expected)
    if chunks and not on_cuda:
        options["attention"] = "triton"
    trees = {"nodes": 7, "topk": 2, "tree": {"drafter": "table", "fallback": "refuse"}, **options}
    with pair.engine(**trees) as llm:
        assert greedy(llm, prompts, tokens) == expected
        metrics = spec_metrics(llm)
        if chunks:
            # Negative control. No graph holds these layers.
            spoil(monkeypatch)
            assert greedy(llm, prompts, tokens) != expected
    assert metrics.accepted_tokens > metrics.drafts
    if chunks or on_cuda:
        return
    # Negative control: with the spoilt code tokens differ.
    spoil(monkeypatch)
    with pair.engine(**trees) as llm:
        assert greedy(llm, prompts, tokens) != expected
