"""What wrong costs lose, as the table says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import wrong_costs
from tests.support.wrong_costs import (
    ALIKE_MS,
    FAR,
    FAR_CONTEXT,
    FAR_LENGTHS,
    TURN,
    far,
    shares,
)


def test_a_table_has_the_cases_that_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    wrong_costs.main(
        ["--steps", "60", "400", "--seeds", "2", "--only", "Qwen3.5, 16 requests, as measured"]
    )
    *_, row = capsys.readouterr().out.splitlines()
    name, begin, after = (each.strip() for each in row.strip("|").split("|")[:3])
    assert name == "Qwen3.5, 16 requests, as measured"
    median, worst = map(float, after.split(" / "))
    # The first steps have the number that the wrong costs ask for.
    assert float(begin.split(" / ")[0]) < worst <= median <= 1.0


def test_a_row_has_the_median_and_the_worst_seed(capsys: pytest.CaptureFixture[str]) -> None:
    only = "4 requests, contexts of 33k"
    wrong_costs.main(["--steps", "100", "300", "--seeds", "3", "--only", only])
    _, _, row = capsys.readouterr().out.splitlines()
    expected = [shares(far(), (100, 300), seed) for seed in range(3)]
    cells = [f"{sorted(each)[1]:.3f} / {min(each):.3f}" for each in zip(*expected)]
    assert [cell.strip() for cell in row.split("|")[2:4]] == cells


def test_long_contexts_make_many_nodes_worse_than_they_seem() -> None:
    """63 nodes would be the best if the contexts took the same time with any number of nodes."""
    told = far().told
    assert max(FAR, key=lambda nodes: FAR_LENGTHS[nodes] / (told[nodes] + 6.0)) == 63
    assert max(FAR, key=lambda nodes: FAR_LENGTHS[nodes] / FAR[nodes]) == 15


def test_contexts_take_turns() -> None:
    """The best number of nodes changes with them, but where they cost all numbers alike."""
    world = far(near=True)
    contexts = [world.at(step).context for step in (0, TURN - 1, TURN, 2 * TURN)]
    assert contexts == [500, 500, FAR_CONTEXT, 500]
    alone = far()
    assert world.at(TURN).ms == alone.ms
    assert alone.at(TURN) is alone
    for nodes, ms in far(rows=False, near=True).ms.items():
        assert far(rows=False).ms[nodes] == ms + ALIKE_MS
        assert world.ms[nodes] == ms


def test_a_share_is_of_what_the_best_number_takes_in_each_turn() -> None:
    """A tuner that always takes 30 nodes loses something where 15 are better."""
    world = replace(far(near=True), ms={30: 6.8}, told={30: 6.4})
    assert world.other is not None
    alone = replace(world.other, ms={30: FAR[30]})
    marks = (TURN, 2 * TURN)
    assert shares(replace(world, other=alone), marks, 0) == pytest.approx([1.0, 1.0])
    lost = alone.best() / world.other.best()
    assert shares(world, marks, 0) == pytest.approx([1.0, lost], abs=1e-3)
    assert lost < 0.99
