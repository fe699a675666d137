"""vLLM's own number of drafts by batch size, with trees: any first nodes are the best tree."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.engines.pairs import Answer, Pair, Request, answer_all
from vllm_graft.testing import model_runner, spec_metrics

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SCHEDULE = [(1, 1, 15), (2, 2, 5), (3, 8, 0)]


def staggered(pair: Pair, tokens: list[int]) -> list[Request]:
    """Make requests that end one after another, so that the batch shrinks through the schedule."""
    return [
        Request(prompt, {"seed": i, "temperature": i % 2, "max_tokens": count})
        for i, (prompt, count) in enumerate(zip(pair.prompts, tokens))
    ]


Alone = Callable[..., tuple[list[Request], list[Answer]]]


@pytest.fixture(scope="module")
def alone(pair: Pair) -> Alone:
    """Give requests of so many tokens each, with the answers of the target alone."""
    lengths = [(6, 12, 24), (60,), (3, 5, 9)]
    with pair.engine() as llm:
        found = {}
        for tokens in lengths:
            asked = staggered(pair, [*tokens])
            found[tokens] = asked, answer_all(llm, asked)
    return lambda *tokens: found[tokens]


def test_tokens_are_the_target_s_at_every_number(pair: Pair, alone: Alone) -> None:
    requests, expected = alone(6, 12, 24)
    with pair.engine(nodes=15, ranges=SCHEDULE, max_num_seqs=4, async_scheduling=True) as llm:
        assert answer_all(llm, requests) == expected
        metrics = spec_metrics(llm)
    # Both numbers of drafts were verified, each at least once.
    assert metrics.draft_tokens % 15
    assert metrics.draft_tokens % 5 == 0
    assert metrics.draft_tokens > 15


def test_numbers_chosen_while_serving(pair: Pair, alone: Alone) -> None:
    """``shape: auto`` tries several shapes, and every token is still the target's."""
    requests, expected = alone(60)
    options: dict[str, Any] = {"max_num_seqs": 8, "async_scheduling": True}
    with pair.engine(nodes=15, tree={"shape": "auto"}, **options) as llm:
        assert answer_all(llm, requests) == expected
        core: Any = llm.llm_engine.engine_core
        tuner = core.engine_core.scheduler.dynamic_sd_lookup.tuner
        shapes = {plan.shape for plan in model_runner(llm).speculator.trees.plans.values()}
    tried = [nodes for nodes, seen in tuner._acceptance._seen.items() if seen.missed]
    assert len(tried) >= 3
    assert {shape.num_nodes for shape in shapes} >= set(tried) - {0}
    assert len({(shape.topk, shape.steps) for shape in shapes}) >= 3


def test_graphs_of_every_number(pair: Pair, alone: Alone) -> None:
    """Each width has its own recorded graph, and batches without drafts have one of one row."""
    requests, expected = alone(3, 5, 9)
    options: dict[str, Any] = {"attention": "triton", "graphs": [1, 2, 4, 8, 12, 16]}
    with pair.engine(nodes=15, ranges=SCHEDULE, max_num_seqs=3, **options) as llm:
        assert answer_all(llm, requests) == expected
        graphs = model_runner(llm).cudagraph_manager.graphs
        used = {desc.uniform_token_count for desc, graph in graphs.items() if graph.replays}
        levels = model_runner(llm).speculator.draft_graphs()
        assert sum(graph.replays for graph in levels) > 0
        del graphs, levels
    assert used == {1, 6, 16}
