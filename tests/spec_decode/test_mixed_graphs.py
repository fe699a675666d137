"""Prompts beside trees as one graph: tokens are the target's, whatever the batch is made of."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from tests.support.answers.metrics_page import metrics_page
from tests.support.engines.pairs import Answer, Pair, Request, answer_all
from vllm_graft.base.errors import ConfigError
from vllm_graft.metrics.server_info import total
from vllm_graft.spec_decode.chunking.graph_fit import chunk_prompts
from vllm_graft.spec_decode.verification.context import Counters
from vllm_graft.testing import model_runner

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CUT_STEPS = "vllm:graft_tree_cut_steps_total"
CHUNKED_STEPS = "vllm:graft_tree_chunked_steps_total"


def engine(pair: Pair, requests: int = 2) -> AbstractContextManager[Any]:
    options: dict[str, Any] = {"attention": "triton", "graphs": [2, 4, 8, 16, 64]}
    tree = {"mixed_graphs": True}
    return pair.engine(nodes=7, steps=3, tree=tree, max_num_seqs=requests, **options)


def arriving(pair: Pair) -> list[Request]:
    """Make a long request, and short ones whose prompts run beside its trees, one after another."""
    return [
        Request(
            prompt[: 40 + 20 * i], {"seed": i, "temperature": i % 2, "max_tokens": 3 if i else 14}
        )
        for i, prompt in enumerate(pair.prompts[:4])
    ]


PARTS = ((1, 80), (2, 150), (0, 180), (3, 180), (8, 170))
"""Prompts and their lengths in characters: 25 tokens, 62 three times, and 88."""


def crowded(pair: Pair) -> list[Request]:
    """Make a long request; beside its tree, prompts that fit the largest graph if it is cut."""
    return [
        Request(
            pair.prompts[number][:length],
            {"seed": place, "temperature": place % 2, "max_tokens": 3 if place else 16},
        )
        for place, (number, length) in enumerate(PARTS)
    ]


class Counted(NamedTuple):
    """What an engine counted while it answered."""

    replays: int
    cuts: int
    launches: int
    chunks: int


class Served(NamedTuple):
    """What an engine with graphs of mixed batches answered to `arriving`, and what it counted."""

    answers: list[Answer]
    graphs: dict[int, int]
    counters: Counters
    page: str


class Crowds(NamedTuple):
    """What such an engine answered to `crowded`, and what it counted."""

    chunked: list[Answer]
    chunked_counts: Counted
    cut: list[Answer]
    counts: Counted
    whole: list[Answer]
    whole_counts: Counted
    spoilt: list[Answer]


@pytest.fixture(scope="module")
def alone(pair: Pair) -> tuple[list[Answer], list[Answer]]:
    """Answers of the target alone to `arriving` and to `crowded`."""
    with pair.engine() as llm:
        return answer_all(llm, arriving(pair)), answer_all(llm, crowded(pair))


@pytest.fixture(scope="module")
def served(pair: Pair) -> Served:
    with engine(pair) as llm:
        runner = model_runner(llm)
        answers = answer_all(llm, arriving(pair))
        graphs = runner.cudagraph_manager.graphs.items()
        mixed = {d.num_tokens: g.replays for d, g in graphs if d.uniform_token_count is None}
        return Served(answers, mixed, replace(runner.speculator.context.counters), metrics_page())


@pytest.fixture(scope="module")
def crowds(pair: Pair) -> Crowds:
    with engine(pair) as llm:
        context = model_runner(llm).speculator.context
        counters = context.counters
        # The control below reads what earlier requests have left in the cache.
        answer_all(llm, arriving(pair))

        def counted() -> tuple[list[Answer], Counted]:
            before = replace(counters)
            assert llm.reset_prefix_cache()
            found = answer_all(llm, crowded(pair))
            replays = counters.mixed_replays - before.mixed_replays
            return found, Counted(
                replays,
                counters.cut_steps - before.cut_steps,
                counters.mixed_launches - before.mixed_launches,
                counters.chunked_steps - before.chunked_steps,
            )

        cut = counted()
        assert total(metrics_page(), CUT_STEPS) == counters.cut_steps
        core: Any = llm.llm_engine.engine_core
        scheduler = core.engine_core.scheduler
        # The engine itself chunks nothing for a graph of 64 rows.
        assert "schedule" not in vars(scheduler)
        chunk_prompts(scheduler, 64, cuts=True)
        chunked = counted()
        assert total(metrics_page(), CHUNKED_STEPS) == counters.chunked_steps
        # Ours hide vLLM's own functions on the engine's instance.
        del scheduler.schedule, scheduler._update_after_schedule
        whole = counted()
        context.rows = replace(context.rows, num_rows=context.rows.num_rows.clone())
        return Crowds(*chunked, *cut, *whole, answer_all(llm, arriving(pair)[:2]))


def test_tokens_are_the_target_s(served: Served, alone: tuple[list[Answer], list[Answer]]) -> None:
    assert served.answers == alone[0]


def test_steps_of_trees_and_prompts_are_replayed(served: Served) -> None:
    counters, page, name = served.counters, served.page, "vllm:graft_tree_"
    assert set(served.graphs) == {8, 16, 64}
    assert sum(served.graphs.values()) >= counters.mixed_replays > 0
    for batch in ("tree", "mixed"):
        for way in ("replays", "launches"):
            told = total(page, f"{name}target_{way}_total", batch=batch.replace("tree", "trees"))
            assert told == getattr(counters, f"{batch}_{way}")
    assert total(page, f"{name}draft_replays_total") == counters.draft_replays > 0
    assert total(page, f"{name}draft_graphs") > 0


@pytest.mark.nightly
def test_trees_are_cut_to_the_largest_graph(
    crowds: Crowds, alone: tuple[list[Answer], list[Answer]]
) -> None:
    """Tokens stay the target's, and no step that would fit a graph with fewer nodes misses it."""
    assert crowds.cut == crowds.whole == alone[1]
    assert crowds.counts.cuts > 0 == crowds.whole_counts.cuts
    assert crowds.counts.replays > crowds.whole_counts.replays
    # Negative control: the graph's own tree kernel is needed for these tokens.
    assert crowds.spoilt != alone[0][:2]


@pytest.mark.nightly
def test_prompts_are_chunked_to_the_largest_graph(
    crowds: Crowds, alone: tuple[list[Answer], list[Answer]]
) -> None:
    """Tokens stay the target's, and where a cut does not suffice, a chunk does."""
    assert crowds.chunked == alone[1]
    assert crowds.chunked_counts.chunks > 0 == crowds.counts.chunks
    assert crowds.chunked_counts.launches == 0 < crowds.counts.launches


def test_asked_for_and_impossible_is_an_error(pair: Pair) -> None:
    says = "mixed_graphs is true, but --max-num-seqs is 1"
    with pytest.raises(ConfigError, match=says), engine(pair, requests=1):
        pass
