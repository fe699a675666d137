"""Real engines whose drafts come from a vocabulary that is learned while they serve."""

from typing import Any

import pytest

from tests.support.engines.pairs import Answer, Pair, Request, answer_all, differing
from tests.support.watches import choose_often, narrowed
from vllm_graft.spec_decode.drafters.levels import LevelGrowth
from vllm_graft.testing import model_runner, spec_metrics

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

SIZE = 96
"""Hot tokens, out of the 1,024 of the shipped draft."""


def test_tokens_are_those_of_the_target_alone(
    pair: Pair, samples: list[Request], expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = narrowed(monkeypatch)
    with pair.engine(nodes=15, tree={"hot_tokens": SIZE}, max_num_seqs=3) as llm:
        assert not differing(answer_all(llm, samples[:4]), expected[:4])
        assert spec_metrics(llm).acceptance_length > 1.2
        (info,) = llm.collective_rpc("graft_info")
    first = [narrow for narrow, is_first in passes if is_first]
    # All drafts of the first steps come from the whole vocabulary; later on those of all levels,
    # the root's children among them, are hot tokens.
    assert {False, True} == {narrow for narrow, _ in passes} == set(first)
    assert not any(first[:2])
    assert all(first[-2:])
    hot = info["counters"]["tree"]["hot_tokens"]
    assert hot["active"] is True
    assert hot["size"] == SIZE
    assert hot["choices"] > 2
    assert 0.0 < hot["coverage"] <= 1.0


def test_both_vocabularies_have_graphs(
    pair: Pair, samples: list[Request], expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded FULL graphs, compared with launches; the learned tensors change beneath them."""
    choose_often(monkeypatch)
    bounds: list[int] = []
    metadata = LevelGrowth.metadata

    def noted(levels: LevelGrowth, num_reqs: int, max_seq_len: int) -> Any:
        bounds.append(max_seq_len)
        return metadata(levels, num_reqs, max_seq_len)

    monkeypatch.setattr(LevelGrowth, "metadata", noted)
    short = [Request(each.prompt, {**each.params, "max_tokens": 10}) for each in samples[2:4]]
    eagle = {"hot_tokens": SIZE, "graph_runner": "verify"}
    with pair.engine(nodes=7, steps=3, tree=eagle, graphs=[4, 8, 16], max_num_seqs=2) as llm:
        captured = len(bounds)
        found = [answer.tokens[0] for answer in answer_all(llm, short)]
        assert found == [answer.tokens[0][:10] for answer in expected[2:4]]
        (info,) = llm.collective_rpc("graft_info")
        speculator = model_runner(llm).speculator
        replays = [
            sum(
                graph.replays
                for plan in plans.values()
                for graph in speculator.runner(plan).graphs.values()
            )
            for plans in (speculator.trees.plans, speculator.trees.narrow_plans)
        ]
        longest = speculator.max_model_len
        del speculator
    # Launches beside a graph split keys as the graph does, whatever the batch's lengths.
    assert captured < len(bounds)
    assert set(bounds) == {longest}
    assert min(replays) > 0
    assert info["counters"]["tree"]["draft_graphs_differing"] == {7: []}
    assert info["counters"]["tree"]["draft_graphs_verified"][7]
