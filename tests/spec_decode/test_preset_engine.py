"""One flag on a real engine: what ``graft: auto`` decides is what runs."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_graft.testing import model_runner, spec_metrics
from vllm_graft.testing.pairs import Answer, Pair, Request, answer_all, differing

pytestmark = pytest.mark.engine


def test_auto_grows_trees_of_the_depth_and_answers_as_the_target(
    pair: Pair, samples: list[Request], expected: list[Answer]
) -> None:
    depth = 5
    with pair.engine(chain=depth, additional_config={"graft": "auto"}) as llm:
        assert differing(answer_all(llm, samples), expected) == []
        metrics = spec_metrics(llm)
        [told] = llm.collective_rpc("graft_info")
        config = llm.llm_engine.vllm_config
        core: Any = llm.llm_engine.engine_core
        scheduler = core.engine_core.scheduler
        # The scheduler, its lookahead and the worker agree about the number of nodes.
        assert scheduler.num_spec_tokens == config.num_speculative_tokens == 63
        assert scheduler.num_lookahead_tokens == config.num_lookahead_tokens == 63
        assert model_runner(llm).speculator.num_speculative_steps == 63
        del core, scheduler
    assert told["parts"] == ["tree"]
    assert told["preset"]["name"] == "auto"
    assert "topk 8, steps 5" in told["preset"]["on"]["tree"]
    assert told["preset"]["off"].keys() == {"hicache", "vit", "draft"}
    assert told["counters"]["tree"]["nodes_verified"] > 0
    # More nodes than a chain of that depth has, and no path deeper than it.
    assert metrics.draft_tokens > depth * metrics.drafts
    assert metrics.accepted_tokens > metrics.drafts
    assert not any(metrics.accepted_per_position[depth:])
