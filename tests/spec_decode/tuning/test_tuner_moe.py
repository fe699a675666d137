"""The tuner where measured costs are wrong: each row asks for experts of its own."""

from __future__ import annotations

import hashlib
from typing import Any
from unittest import mock

import pytest

from tests.support.worlds import tuner_world
from tests.support.worlds.closed_loop import Loop
from tests.support.worlds.moe_world import Service, make
from vllm_graft.spec_decode.tuning import excess
from vllm_graft.spec_decode.tuning.shapes import DENSE, NARROW, Ladder
from vllm_graft.spec_decode.tuning.step_times import StepTimes
from vllm_graft.spec_decode.tuning.trials import Trials
from vllm_graft.spec_decode.tuning.tuner import NodeTuner

FLAT = 0.06
"""Part of what nodes cost that is told, where measured rows all ask for the same experts."""


def mean(
    slope: float, batch: int, *, experts: bool = True, ladder: Ladder = NARROW, steps: int = 500
) -> float:
    """Return the mean over texts and prompts of the throughput over that of the best number."""
    ratios = [
        Service(text, batch, prompts=prompts, ladder=ladder).against_the_best(
            make(31, slope, experts=experts, ladder=ladder), steps
        )
        for text in ("usual", "easy")
        for prompts in (0.0, 0.3)
    ]
    return sum(ratios) / len(ratios)


# A dense head of a target with experts has the dense ladder.
@pytest.mark.parametrize(("batch", "ladder"), [(1, NARROW), (4, NARROW), (4, DENSE)])
def test_costs_that_hide_what_a_node_costs_are_corrected(batch: int, ladder: Ladder) -> None:
    found = mean(FLAT, batch, ladder=ladder)
    assert found > 0.9
    # Without experts it trusts the costs but for a constant.
    assert found > mean(FLAT, batch, experts=False, ladder=ladder) + 0.04


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("slope", [1.0, 2.0])
def test_costs_that_are_right_or_too_steep(batch: int, slope: float) -> None:
    assert mean(slope, batch) > 0.94


def test_trials_and_a_slope_together_correct_them() -> None:
    """Negative controls: without trials nothing tells a slope, without one a trial tells less."""
    found = mean(FLAT, 4)
    with mock.patch.object(Trials, "rival", return_value=None):
        assert mean(FLAT, 4) < found - 0.04
    with mock.patch.object(excess, "_SLOPE_DOUBT", 1e9):
        # Each number that was tried has its own cost mended, and the others keep theirs.
        assert mean(FLAT, 4) < found - 0.02
        with mock.patch.object(StepTimes, "mend", return_value=0.0):
            assert mean(FLAT, 4) < found - 0.1


def choices(tuner: NodeTuner) -> list[int]:
    """Return what a tuner chooses in the closed loops of two texts and two batch sizes."""
    seen: list[int] = []

    def choose(batch: int) -> int:
        seen.append(tuner.begin_step(batch))
        return seen[-1]

    for text, batch in (("0", 16), ("1", 4), ("0.6", 64), ("1", 1)):
        Loop(text, batch, seed=1).rate(choose, tuner.observe)
    return seen


CHOICES = "d56564b935c74b78"
"""Of the choices in closed loops of the tuner of commit 3c7b660, which knew of no experts."""


def digest(tuner: NodeTuner) -> str:
    return hashlib.sha256(bytes(choices(tuner))).hexdigest()[:16]


def test_dense_models_with_right_costs_are_tuned_as_before_but_for_trials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither slopes nor mended costs change a choice. Trials do, as they choose something else."""
    stock, made = NodeTuner.__init__, {"experts": True}

    def with_experts(tuner: NodeTuner, *args: Any, **kwargs: Any) -> None:
        stock(tuner, *args, **kwargs, **made)

    with_trials = digest(tuner_world.make())
    with monkeypatch.context() as patch:
        # Control: the same costs are corrected by a slope where there are experts.
        patch.setattr(NodeTuner, "__init__", with_experts)
        assert digest(tuner_world.make()) != with_trials
    monkeypatch.setattr(Trials, "rival", lambda *_: None)
    assert digest(tuner_world.make()) == CHOICES != with_trials
