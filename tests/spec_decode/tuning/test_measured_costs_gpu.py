"""Costs measured at the start, checked graphs, and a learned vocabulary, on a device."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.support.engines.gpu_engines import shipped_trees
from tests.support.engines.pairs import Pair
from tests.support.engines.shipped_pair import SHIPPED
from vllm_graft.spec_decode.drafters import step_costs, tuner_seed
from vllm_graft.spec_decode.heads import hot_vocabulary
from vllm_graft.spec_decode.heads.hot_vocabulary import HotGains
from vllm_graft.testing import model_runner

pytestmark = [pytest.mark.gpu, pytest.mark.engine]


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        # The vocabulary is chosen often, and used whatever its coverage.
        patch.setattr(hot_vocabulary, "PERIOD", 16)
        patch.setattr(hot_vocabulary, "LATE", 8)
        patch.setattr(HotGains, "least", lambda *_: 0.0)
        eagle = {
            "shape": "auto", "graph_runner": "verify", "hot_tokens": 256, "head_dtype": "fp8",
        }  # fmt: skip
        with shipped_trees(eagle) as built:
            yield built


def core(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def test_every_number_has_a_cost_from_the_start(llm: Any) -> None:
    tuner = core(llm).scheduler.dynamic_sd_lookup.tuner
    costs = tuner.costs
    assert set(costs) == set(tuner.allowed(1))
    for counts in costs.values():
        assert {1, 2, 4, 8} <= set(counts)
        assert all(0 < seconds < 0.1 for seconds in counts.values())
    # A step with a tree also takes the passes of the draft.
    assert max(costs[15].values()) > costs[0][1]


def test_measuring_is_short_and_touches_no_kv(llm: Any) -> None:
    runner = model_runner(llm)
    before = [cache.clone() for cache in runner.kv_caches]
    began = time.perf_counter()
    tuner_seed.measure(core(llm))
    assert time.perf_counter() - began < 5
    assert all(torch.equal(a, b) for a, b in zip(before, runner.kv_caches, strict=True))


def test_rows_that_are_timed_have_states_of_their_own(
    llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts, where a target has them, would else be the same ones for all rows."""

    def all_different(tokens: torch.Tensor, vocab: int) -> None:
        assert len(tokens) <= vocab
        tokens.copy_(torch.arange(len(tokens)))

    monkeypatch.setattr(step_costs, "draw_tokens", all_different)
    runner = model_runner(llm)
    states = runner.cudagraph_manager.hidden_states
    with torch.inference_mode():
        states.fill_(float("nan"))
    tuner_seed.measure(core(llm))
    timed = states[states.isfinite().all(1)]
    assert len(timed) > 16
    assert len(timed.unique(dim=0)) == len(timed)


def test_graphs_that_served_were_checked(llm: Any) -> None:
    prompts = Pair.load(SHIPPED).prompts
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    for batch in (1, 3, 8):
        llm.generate(prompts[:batch], params, use_tqdm=False)
    speculator = model_runner(llm).speculator
    report = speculator.report()
    assert sum(map(len, report["draft_graphs_verified"].values())) >= 2
    assert not any(report["draft_graphs_differing"].values())


def test_the_learned_vocabulary_is_in_use(llm: Any) -> None:
    """The test above has filled the host's copy, and the tensors that captured graphs read."""
    speculator = model_runner(llm).speculator
    learned = speculator.head.learned
    report = learned.report()
    assert report["active"]
    assert report["choices"] >= 2
    assert 0.3 < report["coverage"] <= 1.0
    rows = torch.isin(speculator.head.target_ids, learned.target_ids)
    assert int(rows.sum()) == 256
    hot, whole = learned.rows.rows, speculator.head.fp8
    assert torch.equal(hot.weight.view(torch.uint8), whole.weight.view(torch.uint8)[rows])
    assert torch.equal(hot.scale, whole.scale[rows])
    assert report["steps"] > 0
    plans = speculator.trees.narrow_plans.values()
    verified = [speculator.runner(plan).checks()["verified"] for plan in plans]
    assert any(verified)
