"""Prompts beside trees as one graph: tokens are the target's, whatever the batch is made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.metrics_page import metrics_page
from vllm_graft.metrics.exposition import total
from vllm_graft.testing.pairs import Pair, Request, answer_all

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def options(pair: Pair, **eagle: Any) -> dict[str, Any]:
    return {
        "max_num_seqs": 2,
        "attention": "triton",
        "graphs": [2, 4, 8, 16, 64],
        "speculative_config": {
            "method": "eagle3",
            "model": pair.draft,
            "num_speculative_tokens": 7,
        },
        "additional_config": {"graft": {"tree": {"topk": 4, "steps": 3, **eagle}}},
    }


def arriving(pair: Pair) -> list[Request]:
    """Make a long request, and short ones whose prompts run beside its trees, one after another."""
    return [
        Request(
            prompt[: 40 + 20 * i], {"seed": i, "temperature": i % 2, "max_tokens": 3 if i else 20}
        )
        for i, prompt in enumerate(pair.prompts[:4])
    ]


def test_tokens_are_the_target_s(pair: Pair) -> None:
    from vllm_graft.testing import cpu_engine
    from vllm_graft.testing.engine import model_runner

    requests = arriving(pair)
    with pair.engine() as llm:
        expected = answer_all(llm, requests)
    with cpu_engine(pair.target, **options(pair, mixed_graphs=True)) as llm:
        runner = model_runner(llm)
        assert answer_all(llm, requests) == expected
        graphs = runner.cudagraph_manager.graphs.items()
        mixed = {d.num_tokens: g.replays for d, g in graphs if d.uniform_token_count is None}
        counters = runner.speculator.context.counters
        assert set(mixed) == {8, 16, 64}
        assert sum(mixed.values()) >= counters.mixed_replays > 0
        page, name = metrics_page(), "vllm:graft_tree_"
        for batch in ("tree", "mixed"):
            for way in ("replays", "launches"):
                told = total(
                    page, f"{name}target_{way}_total", batch=batch.replace("tree", "trees")
                )
                assert told == getattr(counters, f"{batch}_{way}")
        assert total(page, f"{name}draft_replays_total") == counters.draft_replays > 0
        assert total(page, f"{name}draft_graphs") > 0
        # Negative control: the graph's own tree kernel is needed for these tokens.
        context = runner.speculator.context
        context.rows = replace(context.rows, num_rows=context.rows.num_rows.clone())
        assert answer_all(llm, requests) != expected
        del runner, graphs, context


PARTS = ((1, 80), (2, 150), (0, 180), (3, 180), (8, 170))
"""Prompts and their lengths in characters: 25 tokens, 62 three times, and 88."""


def crowded(pair: Pair) -> list[Request]:
    """Make a long request; beside its tree, prompts that fit the largest graph if it is cut."""
    return [
        Request(
            pair.prompts[number][:length],
            {"seed": place, "temperature": place % 2, "max_tokens": 3 if place else 24},
        )
        for place, (number, length) in enumerate(PARTS)
    ]


def test_trees_are_cut_to_the_largest_graph(pair: Pair) -> None:
    """Tokens stay the target's, and no step that would fit a graph with fewer nodes misses it."""
    from vllm_graft.testing import cpu_engine
    from vllm_graft.testing.engine import model_runner

    requests = crowded(pair)
    with pair.engine() as llm:
        expected = answer_all(llm, requests)
    counts = {}
    for fits in (True, False):
        asked = options(pair, mixed_graphs=True, fit_graphs=fits)
        with cpu_engine(pair.target, **asked) as llm:
            counters = model_runner(llm).speculator.context.counters
            assert answer_all(llm, requests) == expected
            page = metrics_page()
            assert total(page, "vllm:graft_tree_cut_steps_total") == counters.cut_steps
            counts[fits] = counters.mixed_replays, counters.cut_steps
    assert counts[True][1] > 0 == counts[False][1]
    assert counts[True][0] > counts[False][0]


def test_asked_for_and_impossible_is_an_error(pair: Pair) -> None:
    from vllm_graft.base.errors import ConfigError
    from vllm_graft.testing import cpu_engine

    wrong = {**options(pair, mixed_graphs=True), "max_num_seqs": 1}
    with (
        pytest.raises(ConfigError, match="mixed_graphs is true, but --max-num-seqs is 1"),
        cpu_engine(pair.target, **wrong),
    ):
        pass
