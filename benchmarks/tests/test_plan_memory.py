"""Configurations with fewer layers, and the judgement of figures; engines are for GPUs."""

from __future__ import annotations

import pytest

from benchmarks import plan_memory
from benchmarks.plan_memory import CASES, cut, worst
from tests.plugin.plan.stranger_models import MODELS


@pytest.mark.parametrize("name", CASES)
def test_a_cut_leaves_the_shapes_of_layers(name: str) -> None:
    case = CASES[name]
    whole = MODELS[case.model]
    text = whole.get("text_config", whole)
    layers = case.layers or text["num_hidden_layers"]
    short = cut(whole, layers)
    short = short.get("text_config", short)
    assert short["num_hidden_layers"] == layers <= text["num_hidden_layers"]
    assert short.keys() == text.keys()
    for key in ("layer_types", "hybrid_override_pattern"):
        if key in text:
            assert short[key] == text[key][:layers]
    assert short["hidden_size"] == text["hidden_size"]


def test_the_worst_figure_counts() -> None:
    found = {"weights": 100.0, "per_token": 50.0, "tokens_per_gib": 0.0}
    found |= {f"planned_{name}": value for name, value in found.items()}
    assert worst(found) == 0
    assert worst({**found, "planned_per_token": 47.0}) == pytest.approx(0.06)
    assert worst({"error": "it did not start"}) > plan_memory.TOLERANCE
