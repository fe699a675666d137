"""Requests with numbers of nodes of their own: every token is the target's, whatever the shares."""

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.answers.metrics_page import metrics_page
from tests.support.engines.pairs import Answer, Pair, Request, differing, scheduling
from tests.support.engines.pairs import answer_all as answers_of
from vllm_graft.metrics.server_info import total
from vllm_graft.spec_decode.drafters import target_dependent
from vllm_graft.spec_decode.drafters.step_costs import measure_step_costs
from vllm_graft.spec_decode.tuning import scheduling as tree_scheduling
from vllm_graft.spec_decode.tuning import tuner as tuning
from vllm_graft.spec_decode.tuning.shared_drafts import SharedDrafts
from vllm_graft.spec_decode.tuning.shares import Share
from vllm_graft.spec_decode.tuning.tuner import NodeTuner
from vllm_graft.spec_decode.verification import context, sampler
from vllm_graft.testing import spec_metrics
from vllm_graft.testing.engine import model_runner

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SHARED_STEPS = "vllm:graft_tree_shared_steps_total"


class Dice(Share):
    """A share that gives each request another number of nodes in each step."""

    rng = random.Random(0)

    def of(self, names: Sequence[str], max_rows: int) -> list[int]:
        return [self.rng.randint(1, self.nodes) for _ in names]


@pytest.fixture
def dice(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Let all steps of ``shape: auto`` have shares by chance; collects the widths of each step."""
    share = Dice(15, {}, 15, 1.0, 1.0)
    seen: list[set[int]] = []

    def begin_step(tuner: Any, batch: int) -> int:
        tuner.share = share
        return share.nodes

    def observe(tuner: Any, *_: Any, widths: Sequence[int], **__: Any) -> None:
        seen.append(set(widths))

    monkeypatch.setattr(NodeTuner, "begin_step", begin_step)
    monkeypatch.setattr(NodeTuner, "observe", observe)
    parts = SimpleNamespace(take=lambda _: {0: {8: 1.0}, 15: {1: 1.0}}, keep=lambda *_: None)
    monkeypatch.setattr(tree_scheduling, "PARTS", parts)
    return seen


def shared(pair: Pair, **options: Any) -> Any:
    return pair.engine(nodes=15, tree={"shape": "auto", "shares": True}, **options)


@pytest.mark.parametrize("ahead", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_tokens_hold_when_crowded(
    pair: Pair,
    samples: list[Request],
    expected: list[Answer],
    dice: list[set[int]],
    ahead: bool,
) -> None:
    """Chunks of prompts, prefixes and preemption; asynchronous scheduling has placeholders."""
    crowded: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 72,
        "enable_prefix_caching": True,
        "num_gpu_blocks_override": 14,
        "async_scheduling": ahead,
    }
    with shared(pair, **crowded) as llm:
        with scheduling(llm) as seen:
            assert not differing(answers_of(llm, samples), expected)
        page = metrics_page()
    assert min(seen.prompt_chunks, seen.chunks_beside_drafts, seen.preempted) > 0
    assert seen.cut_trees > 10
    assert max(map(len, dice)) > 1, "numbers differ within a step"
    assert total(page, SHARED_STEPS) > 10


def rows_of_neighbours(starts: torch.Tensor) -> torch.Tensor:
    """Return bounds by which all requests have as many rows."""
    even = torch.linspace(0, float(starts[-1]), len(starts), device=starts.device)
    return even.to(starts.dtype)


def one_row_early(starts: torch.Tensor) -> torch.Tensor:
    """Return bounds by which the first request has one row less than it has."""
    moved = starts.clone()
    moved[1:-1] -= 1
    return moved


@pytest.mark.parametrize(
    "change", [rows_of_neighbours, pytest.param(one_row_early, marks=pytest.mark.nightly)]
)
def test_controls_where_rows_are_those_of_others_tokens_differ(
    pair: Pair,
    samples: list[Request],
    expected: list[Answer],
    dice: list[set[int]],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    stock = vars(sampler)["walk_tree"]

    def walk(drawn: Any, drafts: Any, starts: Any, *args: Any, **more: Any) -> None:
        stock(drawn, drafts, change(starts), *args, **more)

    with shared(pair, max_num_seqs=4) as llm:
        assert not differing(answers_of(llm, samples[:4]), expected[:4])
        monkeypatch.setattr(sampler, "walk_tree", walk)
        assert llm.reset_prefix_cache()
        assert differing(answers_of(llm, samples[:4]), expected[:4])


@pytest.mark.nightly
def test_controls_a_tree_of_another_request_yields_other_tokens(
    pair: Pair,
    samples: list[Request],
    expected: list[Answer],
    dice: list[set[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock = vars(context)["prepare_rows"]

    def of_neighbours(tree: Any, batch: Any, *args: Any, **more: Any) -> None:
        rolled = {name: each.roll(1, 0) for name, each in vars(tree).items()}
        stock(type(tree)(**rolled), batch, *args, **more)

    monkeypatch.setattr(context, "prepare_rows", of_neighbours)
    with shared(pair, max_num_seqs=4) as llm:
        assert differing(answers_of(llm, samples[:4]), expected[:4])


@pytest.mark.nightly
def test_shares_that_are_learned(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """By costs as an engine of graphs hands them over, and what its requests have accepted."""
    requests = [
        Request(prompt[:80], {"seed": i, "temperature": 1.4 * (i % 2), "max_tokens": 90})
        for i, prompt in enumerate(pair.prompts[:4])
    ]
    with pair.engine() as llm:
        expected = answers_of(llm, requests)
    costs = {n: {4: 0.01 + 0.0004 * n} for n in range(16)}
    parts = {n: {4: 0.0001} for n in range(1, 16)} | {0: {8: 0.01, 12: 0.0101}}
    for name, told in (("MEASURED", costs), ("PARTS", parts)):
        monkeypatch.setattr(tree_scheduling, name, SimpleNamespace(take=lambda _, told=told: told))
    monkeypatch.setattr(tuning, "GAIN", -0.5)
    monkeypatch.setattr(tuning, "LOOK", 1)
    widths: list[list[int]] = []
    cut = SharedDrafts._cut

    def noted(drafts: Any, names: Any) -> None:
        cut(drafts, names)
        if drafts._drafted:
            widths.append([len(drafts._requests[name].spec_token_ids) for name in names])

    monkeypatch.setattr(SharedDrafts, "_cut", noted)
    with shared(pair, max_num_seqs=4, async_scheduling=True) as llm:
        assert answers_of(llm, requests) == expected
        assert total(metrics_page(), SHARED_STEPS) > 5
    # Twelve rows are the most that a step is worth: four roots, and what the kinds are given.
    assert all(sum(each) + 4 <= 12 for each in widths if len(each) == 4)


def test_graphs_whose_rows_any_requests_share(
    pair: Pair, dice: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Target and first pass replay them, and what is accepted is the same as in launches."""
    requests = [
        Request(prompt[:60], {"seed": i, "temperature": i % 2, "max_tokens": 20 + 5 * i})
        for i, prompt in enumerate(pair.prompts[:4])
    ]
    with pair.engine() as llm:
        expected = answers_of(llm, requests)
    options: dict[str, Any] = {
        "nodes": 15,
        "steps": 3,
        "ranges": [(1, 1, 15), (2, 2, 3), (3, 3, 0)],
        "tree": {"shape": "auto", "shares": True, "mixed_graphs": True},
        "max_num_seqs": 3,
        "graphs": [1, 2, 4, 8, 16, 24, 32, 48],
    }
    accepted = []
    for planned in (True, False):
        Dice.rng.seed(1)
        if not planned:
            monkeypatch.setattr(target_dependent, "plan_mixed_graphs", lambda *_: None)
        with pair.engine(**options) as llm:
            assert answers_of(llm, requests) == expected
            accepted.append(spec_metrics(llm).accepted_tokens)
            runner = model_runner(llm)
            for graphs, replays in (
                (runner.cudagraph_manager.graphs, True),
                (runner.speculator.prefill_cudagraph_manager.graphs, planned),
            ):
                of_rows = [g for desc, g in graphs.items() if desc.uniform_token_count is None]
                assert (sum(graph.replays for graph in of_rows) > 5) is replays
            _, _, parts = measure_step_costs(SimpleNamespace(model_runner=runner), 1)
            assert set(parts) == ({0, 3, 15} if planned else {3, 15})
            assert set(parts.get(0, ())) <= {8, 16, 24, 32, 48}
            del runner, graphs, of_rows
    assert accepted[0] == accepted[1] > 0
