"""Trees beside prompts are cut to what fits a CUDA graph, before anybody counts the step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graft.spec_decode.tuning.graph_fit import (
    cut_trees,
    drafted,
    fit_to_graphs,
    graph_rows,
    nodes_that_fit,
)
from vllm_graft.spec_decode.tuning.scheduling import StepKind


def output(trees: dict[str, int], others: dict[str, int] | None = None) -> Any:
    """A step of trees with so many nodes, and of other requests with so many rows."""
    scheduled = {name: nodes + 1 for name, nodes in trees.items()} | (others or {})
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens={n: list(range(k)) for n, k in trees.items() if k},
        num_spec_tokens_to_schedule=max(trees.values(), default=0),
    )


def fitting(step: Any, rows: int) -> int | None:
    return nodes_that_fit(step.num_scheduled_tokens, step.scheduled_spec_decode_tokens, rows)


@pytest.mark.parametrize(
    ("trees", "others", "rows", "expected"),
    [
        ({"a": 15, "b": 15}, {"p": 40}, 64, 11),
        ({"a": 15, "b": 15}, {"p": 62}, 64, 0),
        ({"a": 15, "b": 15}, {"p": 63}, 64, None),  # The prompt and the roots alone are too many.
        ({"a": 15, "b": 15}, {"p": 32}, 64, None),  # It fits.
        ({"a": 15, "b": 15}, {}, 24, None),  # No prompt runs.
        ({"a": 15, "b": 3}, {"p": 50}, 64, 6),  # A short tree keeps its nodes.
        ({"a": 15}, {"d": 1, "p": 50}, 64, 12),  # A decode without a tree is no prompt.
        ({"a": 15}, {"d": 1}, 8, None),
        ({}, {"p": 100, "d": 1}, 64, None),
    ],
)
def test_nodes_that_fit(
    trees: dict[str, int], others: dict[str, int], rows: int, expected: int | None
) -> None:
    step = output(trees, others)
    assert fitting(step, rows) == expected
    cut_trees(step, rows)
    assert step.total_num_scheduled_tokens == sum(step.num_scheduled_tokens.values())
    assert (drafted(step) is None) == (expected is None)
    if expected is None:
        assert vars(step) == vars(output(trees, others))
        return
    assert step.total_num_scheduled_tokens <= rows
    for name, nodes in trees.items():
        kept = min(nodes, expected)
        # The first nodes are the best ones.
        assert step.scheduled_spec_decode_tokens.get(name, []) == list(range(kept))
        assert step.num_scheduled_tokens[name] == kept + 1
    assert {n: step.num_scheduled_tokens[n] for n in others} == others
    assert drafted(step) == max(trees.values())
    # Cut once, it fits, so that a second call changes nothing.
    before = dict(step.num_scheduled_tokens)
    cut_trees(step, rows)
    assert step.num_scheduled_tokens == before


def test_no_node_more_would_fit() -> None:
    step = output({"a": 15, "b": 15, "c": 15}, {"p": 30})
    cut_trees(step, 64)
    assert 64 - 3 < step.total_num_scheduled_tokens <= 64


def test_the_kind_of_a_cut_step() -> None:
    step = output({"a": 15, "b": 15}, {"p": 40})
    assert StepKind.of(step) == StepKind(15, 15, ["a", "b"], 3, 40)
    cut_trees(step, 64)
    assert StepKind.of(step) == StepKind(15, 11, ["a", "b"], 3, 40)
    cut_trees(step := output({"a": 15, "b": 15}, {"p": 62}), 64)
    assert StepKind.of(step) == StepKind(15, 0, ["a", "b"], 3, 62)


def config(rows: int | None, mode: int = 1) -> Any:
    compilation = SimpleNamespace(max_cudagraph_capture_size=rows, cudagraph_mode=mode)
    return SimpleNamespace(compilation_config=compilation)


def test_without_graphs_nothing_is_cut() -> None:
    assert [graph_rows(config(rows)) for rows in (512, 0, None)] == [512, 0, 0]
    assert graph_rows(config(512, mode=0)) == 0
    scheduler: Any = SimpleNamespace(vllm_config=config(0))
    fit_to_graphs(scheduler)
    assert vars(scheduler) == {"vllm_config": scheduler.vllm_config}


@pytest.mark.parametrize("connected", [False, True])
def test_who_comes_later_sees_the_cut_step(connected: bool) -> None:
    seen: list[tuple[str, int]] = []

    def count(scheduler_output: Any) -> None:
        seen.append(("requests", scheduler_output.total_num_scheduled_tokens))

    def connect(connector: Any, scheduler_output: Any) -> str:
        seen.append((connector, scheduler_output.total_num_scheduled_tokens))
        return "metadata"

    scheduler: Any = SimpleNamespace(
        vllm_config=config(64), _update_after_schedule=count, _build_kv_connector_meta=connect
    )
    fit_to_graphs(scheduler)
    step = output({"a": 15, "b": 15}, {"p": 40})
    if connected:
        assert scheduler._build_kv_connector_meta("connector", step) == "metadata"
    scheduler._update_after_schedule(step)
    assert seen == [("connector", 64)] * connected + [("requests", 64)]
