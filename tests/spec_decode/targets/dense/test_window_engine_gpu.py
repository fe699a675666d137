"""Engines on a device whose targets have windows, chunks, sinks or shared K/V."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines.gpu_engines import exact_engine, shipped_trees
from tests.support.engines.pairs import Pair, Request, answer_all, differing
from tests.support.engines.shipped_pair import SHIPPED
from tests.support.models.window_models import (
    BLOCK,
    windowed_pair,
    write_gemma4,
    write_gpt_oss,
    write_llama4,
)
from tests.support.references.windowed_reference import compared
from tests.support.samples.attention_samples import draft_problem, untouched
from vllm_graft.spec_decode.kernels.attention.tree_attention import draft_attention
from vllm_graft.spec_decode.kernels.attention.windowed_table import windowed_table
from vllm_graft.spec_decode.targets.dense import layer as grafted
from vllm_graft.spec_decode.targets.dense.samples import AttentionShape
from vllm_graft.spec_decode.trees.batch import DraftBatch, TreeBatch
from vllm_graft.testing import greedy, model_runner, spec_metrics, write_eagle3

pytestmark = [pytest.mark.gpu, pytest.mark.engine]


def test_windows_of_a_trained_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = windowed_pair(tmp_path)
    requests = [
        Request(prompt, {"max_tokens": 48, **kind})
        for prompt in pair.prompts[:8]
        for kind in ({"temperature": 0}, {"seed": 7})
    ]
    with exact_engine(pair.target, block_size=BLOCK) as llm:
        expected = answer_all(llm, requests)
    trees = {"draft": pair.draft, "tree": {"topk": 4, "steps": 4}, "nodes": 15}
    with exact_engine(pair.target, block_size=BLOCK, **trees) as llm:
        assert differing(answer_all(llm, requests), expected) == []
        metrics = spec_metrics(llm)
    assert metrics.accepted_tokens > metrics.drafts / 2
    # Negative control: tree rows that see every key draw other tokens.
    monkeypatch.setattr(grafted, "window_of", lambda impl: 0)
    with exact_engine(pair.target, block_size=BLOCK, **trees) as llm:
        assert differing(answer_all(llm, requests), expected) != []


def unchunked(**given: Any) -> TreeBatch:
    return TreeBatch(**{**given, "chunked": False, "window": 0})


PROMPTS = [[7, 3, 9, 30, 2], [5] * 40, list(range(1, 90))]


@pytest.mark.parametrize("write", [write_gpt_oss, write_gemma4, write_llama4])
def test_families_with_trees_of_another_drafter(
    write: Callable[[Path], Path], tmp_path: Path, learn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts from a table of the target's tokens are accepted far more than a random head's."""
    target, draft = write(tmp_path / "target"), write_eagle3(tmp_path / "draft")
    options = {"block_size": BLOCK, "skip_tokenizer_init": True, "enable_prefix_caching": False}
    with exact_engine(target, **options) as llm:
        expected = greedy(llm, PROMPTS, 40)
    learn(expected)
    tree: dict[str, Any] = {"topk": 2, "steps": 4, "drafter": "table", "fallback": "refuse"}
    with exact_engine(target, draft=str(draft), tree=tree, nodes=7, **options) as llm:
        assert greedy(llm, PROMPTS, 40) == expected
        metrics = spec_metrics(llm)
        if write is write_llama4:
            # Negative control: no graph holds these layers, so that rows see every key at once.
            monkeypatch.setattr(grafted, "TreeBatch", unchunked)
            assert greedy(llm, PROMPTS, 40) != expected
    assert metrics.accepted_tokens > metrics.drafts


WINDOW = 48


def long_requests() -> list[Request]:
    prompts = Pair.load(SHIPPED).prompts
    return [
        Request("\n".join(prompts[4 * place :][:4]), {"max_tokens": 40, **kind})
        for place in range(4)
        for kind in ({"temperature": 0}, {"seed": 7})
    ]


def test_answers_are_the_target_s_and_graphs_equal_launches() -> None:
    requests, target = long_requests(), SHIPPED / "target"
    with exact_engine(target, max_model_len=512) as llm:
        expected = answer_all(llm, requests)
    tree: dict[str, Any] = {
        "topk": 4, "steps": 4, "draft_window": WINDOW, "graph_runner": "verify",
    }  # fmt: skip
    draft = str(SHIPPED / "eagle3")
    with exact_engine(target, draft=draft, nodes=15, tree=tree, max_model_len=512) as llm:
        assert differing(answer_all(llm, requests), expected) == []
        [info] = llm.collective_rpc("graft_info")
    counters = info["counters"]["tree"]
    assert counters["draft_window"] == WINDOW
    assert counters["draft_replays"] > 0
    assert counters["draft_graphs_differing"] == {15: []}


def test_rows_see_their_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, by FlashAttention where vLLM takes it; what is outside holds NaN."""
    # Graphs run no Python: without them each pass comes by here.
    with shipped_trees({"draft_window": WINDOW}, graphs=False) as llm:
        impl = _draft_layer(llm).impl
        with compared(monkeypatch, WINDOW, tolerance=4e-2) as seen:
            answer_all(llm, long_requests()[:4])
    assert type(impl).__name__.startswith("Tree")
    assert min(seen.levels, seen.accepted) > 100
    assert seen.otherwise > seen.narrower / 4 > 25


def test_a_level_reads_what_its_narrowed_table_names() -> None:
    """It computes what it does over a table as wide as the whole text."""
    shape = AttentionShape(
        rows=(0, 0), lens=(30_000, 700), kv_heads=8, group=4, head_size=128, dtype=torch.bfloat16
    )
    problem = draft_problem(shape, 8, 6, 2, "cuda")
    table, lens = windowed_table(
        problem.block_table, problem.prefix_lens, None, window=2048, max_rows=0, block_size=16
    )
    assert lens.tolist() == [16 + 30_000 - (30_000 - 2048) // 16 * 16, 700]
    fields = {**vars(problem), "block_table": table, "prefix_lens": lens, "max_seq_len": None}
    out, expected = untouched(problem.query), untouched(problem.query)
    draft_attention(DraftBatch(**fields), out)
    first = (30_000 - 2048) // 16
    seen = torch.cat([problem.block_table[0, :1], problem.block_table[0, first:]])
    whole = problem.block_table.clone()
    whole[0, : len(seen)] = seen
    fields |= {"block_table": whole}
    draft_attention(DraftBatch(**fields), expected)
    torch.testing.assert_close(out, expected)


def _draft_layer(llm: Any) -> Any:
    speculator = model_runner(llm).speculator
    layers = speculator.vllm_config.compilation_config.static_forward_context
    return layers[min(speculator.draft_attn_layer_names)]
