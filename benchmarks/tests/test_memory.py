"""Workloads that repeat other requests: what is asked, and how much of it repeats."""

from __future__ import annotations

import pytest

from benchmarks.memory import agents, main, repeats, rollouts
from vllm_graft.bench.common.report import BenchmarkError


def test_a_rollout_asks_the_same_in_each_epoch() -> None:
    prompts = [f"p{number}" for number in range(9)]
    load = rollouts(prompts, cells=2, count=4, answers=3, epochs=2)
    assert [len(epochs) for epochs in load.epochs] == [2, 2]
    asked = [
        [[load.prompts[number % len(load.prompts)] for number in epoch] for epoch in epochs]
        for epochs in load.epochs
    ]
    for cell, (first, second) in enumerate(asked):
        assert first == second == [each for each in prompts[4 * cell :][:4] for _ in range(3)]
    # Seeds are the numbers: no two requests have the same.
    numbers = [number for epochs in load.epochs for epoch in epochs for number in epoch]
    assert len(set(numbers)) == len(numbers) == 48
    with pytest.raises(BenchmarkError, match="9 prompts, and 3 cells want 4"):
        rollouts(prompts, cells=3, count=4, answers=3, epochs=2)


def test_an_agent_writes_what_another_has_written() -> None:
    load = agents(cells=2, sessions=3, turns=2, characters=400, kept=600)
    assert [[*epoch] for epoch in load.epochs[0]] == [[0, 1, 2], [3, 4, 5]]
    assert len(load.prompts) == len(set(load.prompts)) == len(load.answers) == 12
    answers = [each.answer for each in load.answers]
    assert sorted(answers[:3]) == sorted(answers[3:6])
    assert not set(answers[:6]) & set(answers[6:])
    # The session has seen no more than the file's beginning.
    assert all(each.answer not in each.prompt for each in load.answers)
    pairs = [([*each.prompt.encode()], [*each.answer.encode()]) for each in load.answers[3:6]]
    _, others = repeats(*zip(*[*pairs, *pairs], strict=True))
    assert 0.5 < others < 1


def test_repeats_are_counted_by_hand() -> None:
    ten = [*range(10)]
    assert repeats([ten], [[*range(20, 30)]]) == (0, 0)
    # Five tokens have to come before: of the last five each follows as it did.
    assert repeats([[*ten, 99]], [ten]) == (0.5, 0)
    assert repeats([[50], [60]], [ten, ten]) == (0, 0.25)


def test_loads_that_are_too_small_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tests/pair", "--requests-in-flight", "64", "--prompts", "4"])
    assert "three times --requests-in-flight" in capsys.readouterr().err
