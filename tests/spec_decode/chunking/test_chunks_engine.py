"""Requests of all lengths in chunks, with few blocks and a step scheduled ahead, on an engine."""

import random
from typing import Any

import pytest

from tests.support.engines.pairs import Pair, Request, answer_all, differing, scheduling
from vllm_graft.spec_decode.chunking.graph_fit import chunk_prompts, fit_to_graphs, is_chunked
from vllm_graft.testing import model_runner

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(600)]

ROWS, NODES, BLOCKS = 32, 15, 10
"""Half of the rows are room for a prompt of one token and a tree of placeholders. With so few
blocks some requests are preempted."""


def mixed(pair: Pair) -> list[Request]:
    """Make 40 requests with prompts of one to some hundred tokens and answers of 1 to 30."""
    rng = random.Random(4)
    return [
        Request(
            rng.choice(pair.prompts)[: rng.choice([1, 2, 30, 120, 200, 300, 400])],
            {
                "temperature": rng.choice([0, 0, 1]),
                "seed": number,
                "max_tokens": rng.choice([1, 2, 10, 30]),
            },
        )
        for number in range(40)
    ]


@pytest.mark.parametrize("shape", ["fixed", "auto"])
@pytest.mark.parametrize("ahead", [False, True])
def test_nothing_waits_for_ever_and_tokens_are_the_target_s(
    pair: Pair, ahead: bool, shape: str
) -> None:
    requests, options = mixed(pair), {"max_num_seqs": 4, "async_scheduling": ahead}
    with pair.engine(**options) as llm:
        expected = answer_all(llm, requests)
    tree = {"shape": shape}
    with pair.engine(nodes=NODES, tree=tree, num_gpu_blocks_override=BLOCKS, **options) as llm:
        core: Any = llm.llm_engine.engine_core
        scheduler = core.engine_core.scheduler
        fit_to_graphs(scheduler, ROWS)
        chunk_prompts(scheduler, ROWS, cuts=True)
        asked: list[tuple[bool, int]] = []
        update = scheduler.update_from_output

        def ended(output: Any, *args: Any) -> Any:
            asked.append((is_chunked(output), output.num_spec_tokens_to_schedule))
            return update(output, *args)

        scheduler.update_from_output = ended
        with scheduling(llm) as schedule:
            assert differing(answer_all(llm, requests), expected) == []
        counters = model_runner(llm).speculator.context.counters
        assert counters.chunked_steps > 10
        assert counters.cut_steps > 5
        assert schedule.preempted
        beside_chunks = {drafts for chunked, drafts in asked if chunked}
        assert beside_chunks == ({0} if shape == "auto" else {NODES})
        assert any(drafts for chunked, drafts in asked if not chunked)
