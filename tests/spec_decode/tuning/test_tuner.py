"""The choice of the number of nodes; how good it is, the tests of worlds say."""

import pytest

from vllm_graft.spec_decode.tuning.step_times import Rates
from vllm_graft.spec_decode.tuning.tuner import BLOCK, NodeTuner

NUMBERS = [0, 3, 7, 14, 31, 47]


def schedule(max_reqs: int) -> list[int]:
    return [0, 47, 31, 14, 7, 3, *[0] * (max_reqs - 5)]


def make(max_reqs: int = 256) -> NodeTuner:
    return NodeTuner(schedule(max_reqs), 512, levels=dict.fromkeys(NUMBERS, 6))


def test_every_number_is_tried_the_schedule_s_first() -> None:
    tuner, choices = make(), list[int]()
    for _ in range(BLOCK * len(NUMBERS)):
        choices.append(tuner.begin_step(3))
        alike = choices[-2:-1] == choices[-1:]
        tuner.observe(choices[-1], [2, 1, 3], 0.005 if alike else None)
    assert choices[:BLOCK] == [14] * BLOCK
    assert set(choices) == set(NUMBERS)


def test_rows_bound_the_number() -> None:
    tuner = make()
    assert tuner.allowed(10) == NUMBERS
    assert tuner.allowed(16) == [0, 3, 7, 14, 31]
    assert tuner.allowed(128) == [0, 3]
    assert tuner.allowed(200) == [0]
    without_zero = NodeTuner([0, 7, 3], 512)
    # There are too many requests for every number: the smallest is chosen, without an error.
    assert without_zero.allowed(200) == [3]
    assert without_zero.begin_step(200) == 3


def test_a_number_without_a_time_is_kept_only_until_it_has_one() -> None:
    tuner = NodeTuner([0, 7, 3], 512)
    for _ in range(3 * BLOCK):
        assert tuner.begin_step(1) == 7
        tuner.observe(7, [2], None)
    tuner.observe(7, [2], 0.005)
    for _ in range(BLOCK):
        tuner.begin_step(1)
    assert tuner.begin_step(1) == 3
    assert tuner.times.predict(1, 7) == 0.005


@pytest.mark.parametrize(
    ("prompts", "chosen"),
    [
        pytest.param((0, 0, 0, 30), 7, id="a few steps"),
        pytest.param((30,), 3, id="all"),
        # These steps fit no graph, whatever the number, so they decide nothing.
        pytest.param((0, 500, 500, 500), 7, id="longer than any graph"),
    ],
)
def test_numbers_that_prompts_leave_without_a_graph_are_not_tried(
    prompts: tuple[int, ...], chosen: int
) -> None:
    """8 requests of 7 nodes fill a graph of 64 rows; by the times of graphs 7 would pay."""
    tuner = NodeTuner([3] * 8 + [7], 64)
    tuner.seed({3: {8: 0.010}, 7: {8: 0.011}})
    for step in range(80):
        tuner.observe(3, [4, 3] * 4, None, batch=8, prompts=prompts[step % len(prompts)])
    assert {tuner.begin_step(8) for _ in range(2 * BLOCK)} == {chosen}


def test_prompts_that_more_tokens_bring_leave_a_number_without_a_graph() -> None:
    """128 greedy requests on an H200: 46 % of the steps of one node have prompts, all of seven.

    Seven nodes of each fill the largest graph, so that without prompts they would have one.
    """
    tuner = NodeTuner([1] * 128 + [7, 3], 1024, levels={1: 1, 3: 3, 7: 7})
    tuner.seed({1: {128: 0.0079}, 3: {128: 0.0130}, 7: {128: 0.0225}})
    emitted = [2, 2, 2, 2, 2, 2, 1, 2] * 16
    for step in range(80):
        has_prompt = int(0.46 * (step + 1)) > int(0.46 * step)
        seconds = 0.0083 + 0.005 * has_prompt
        tuner.observe(1, emitted, seconds, batch=128, prompts=390 * has_prompt)
    assert {tuner.begin_step(128) for _ in range(2 * BLOCK)} <= {1, 3}


def test_cut_trees_leave_no_number_without_a_graph() -> None:
    """8 requests of 7 nodes fill a graph of 64 rows, so that trees beside 16 rows are cut."""
    tuners = [NodeTuner([0, *[7] * 8, 3], max_rows=64, cuts=cuts) for cuts in (False, True)]
    for tuner in tuners:
        for nodes in (3, 7):
            for _ in range(64):
                tuner.observe(nodes, [nodes] * 8, 0.001 + 0.0001 * nodes, prompts=16)
    assert [{tuner.begin_step(8) for _ in range(24)} for tuner in tuners] == [{3}, {7}]


def test_cut_trees_yield_what_they_keep() -> None:
    """Prompts of 40 rows run beside 8 trees in all steps, so these keep 2 nodes of 7 or of 3.

    By what whole trees yield, 7 nodes would win: 8 tokens in 1.5 ms against 4 in 1 ms.
    """
    tuner = NodeTuner([0, *[7] * 8, 3], max_rows=64, cuts=True)
    for _ in range(40):
        for nodes, seconds in ((3, 0.001), (7, 0.0015)):
            tuner.observe(nodes, [nodes + 1] * 8, seconds, prompts=40)
    assert {tuner.begin_step(8) for _ in range(24)} == {3}
    for _ in range(80):
        for nodes, seconds in ((3, 0.001), (7, 0.0015)):
            tuner.observe(nodes, [nodes + 1] * 8, seconds)
    assert {tuner.begin_step(8) for _ in range(24)} == {7}


def test_a_cut_tree_says_nothing_of_acceptance() -> None:
    tuner = NodeTuner([0, *[7] * 8, 3], max_rows=64, cuts=True)
    tuner.observe(7, [4] * 8, 0.001)
    before = tuner._acceptance._seen[7].missed
    tuner.observe(7, [1] * 8, 0.001, prompts=40, verified=2)
    assert tuner._acceptance._seen[7].missed == before
    tuner.observe(7, [1] * 8, 0.001, prompts=8, verified=7)
    assert tuner._acceptance._seen[7].missed > before


@pytest.mark.parametrize("last", [3, 7])
def test_more_tokens_a_step_bring_more_prompts(last: int) -> None:
    """64 greedy requests on an H200: 7 nodes yield more, and more of their steps have prompts.

    512 rows and a prompt fit a far larger graph. 7 nodes would be better if prompts came at a
    constant rate per step; but they come at a constant rate per token.
    """
    tuner = NodeTuner([3] * 64 + [7], 1024, levels={3: 3, 7: 7})
    tuner.seed({3: {64: 0.0080}, 7: {64: 0.0138}})
    alone, beside, fraction = ({3: 0.0083, 7: 0.0141}, {3: 0.0115, 7: 0.0203}, {3: 0.265, 7: 0.725})
    emitted = {3: [4, 3, 3, 3] * 16, 7: [8, 8, 5, 2] * 16}
    for nodes in (10 - last, last):
        behind = 0.0
        for _ in range(200):
            behind += fraction[nodes]
            prompts, behind = (True, behind - 1) if behind >= 1 else (False, behind)
            seconds = (beside if prompts else alone)[nodes]
            tuner.observe(nodes, emitted[nodes], seconds, batch=64, prompts=100 * prompts)
    assert {tuner.begin_step(64) for _ in range(BLOCK)} == {3}


@pytest.mark.parametrize("seen", [[False], [True], [False, True]])
def test_numbers_that_met_prompts_are_compared_fairly(seen: list[bool]) -> None:
    """A prompt takes 20 ms; 7 nodes cost 1 ms more than 3, and yield half a token more."""
    tuner = NodeTuner([0, 7, 3, 0], 512)
    for prompts in (False, True):
        tuner.observe(0, [1], 0.005 + 0.02 * prompts, prompts=prompts)
    for nodes, cost in ((3, 0.006), (7, 0.007)):
        for prompts in [False, True] if nodes == 3 else seen:
            for emitted in (2, 3) * 40:
                emitted += nodes == 7 and emitted == 2
                tuner.observe(nodes, [emitted], cost + 0.02 * prompts, prompts=prompts)
    for prompts in (False, True) * 200:
        tuner.observe(0, [1], None, prompts=prompts)
    assert {tuner.begin_step(1) for _ in range(4 * BLOCK)} == {7}


@pytest.mark.parametrize("costs", [{}, {nodes: {1: 0.01} for nodes in NUMBERS}])
@pytest.mark.parametrize("seconds", [0.0, -0.5])
def test_a_clock_that_stands_still_or_goes_back_says_nothing(
    seconds: float, costs: dict[int, dict[int, float]]
) -> None:
    tuner, expected = make(), make()
    for each, says in ((tuner, seconds), (expected, None)):
        each.seed(costs)
        for step in range(4 * BLOCK):
            nodes = each.begin_step(1)
            each.observe(nodes, [2], says, context=[100, 90_000][step % 2])
    assert tuner.times._seen == expected.times._seen == {}
    assert tuner.times.rates == Rates()
    # Negative control: a time that is one is learned.
    tuner.observe(7, [2], 0.02)
    assert tuner.times._seen or costs


@pytest.mark.parametrize("experts", [False, True])
def test_costs_of_rows_that_read_experts_say_nothing_of_contexts(experts: bool) -> None:
    """Measured costs may be wrong about nodes there, and nothing else tells of long contexts."""
    tuner = NodeTuner([0, 31, 7], 512, experts=experts)
    tuner.seed({7: {1: 0.005}, 31: {1: 0.006}})
    for step in range(200):
        nodes, seconds = [(7, 0.007), (31, 0.014)][step // 50 % 2]
        tuner.observe(nodes, [2], seconds, context=130_000)
    assert (tuner.times.rates.row > 0) is not experts
