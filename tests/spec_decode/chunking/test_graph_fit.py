"""Trees beside prompts are cut to what fits a CUDA graph, before anybody counts the step."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode

from vllm_graft.spec_decode.chunking.graph_fit import (
    count_fitted,
    cut_trees,
    drafted,
    fit_to_graphs,
    graph_rows,
    nodes_that_fit,
)
from vllm_graft.spec_decode.tuning.scheduling import StepKind
from vllm_graft.spec_decode.verification.context import Counters


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


@pytest.mark.parametrize(
    ("rows", "mode", "mixed", "expected"),
    [
        (512, "FULL_AND_PIECEWISE", None, 512),
        (512, "PIECEWISE", False, 512),
        (None, "FULL_AND_PIECEWISE", None, 0),
        (512, "NONE", None, 0),
        # Steps with prompts have no graph at all, unless they are asked for.
        (512, "FULL_DECODE_ONLY", None, 0),
        (512, "FULL_DECODE_ONLY", False, 0),
        (512, "FULL_DECODE_ONLY", True, 512),
    ],
)
def test_the_largest_graph_of_steps_with_prompts(
    rows: int | None, mode: str, mixed: bool | None, expected: int
) -> None:
    compilation = SimpleNamespace(
        max_cudagraph_capture_size=rows, cudagraph_mode=CUDAGraphMode[mode]
    )
    config: Any = SimpleNamespace(compilation_config=compilation)
    assert graph_rows(config, mixed) == expected


def test_a_worker_counts_cut_steps() -> None:
    counters, ran = Counters(), []

    def execute_model(scheduler_output: Any, intermediate_tensors: Any = None) -> str:
        ran.append(scheduler_output)
        return "output"

    runner = SimpleNamespace(
        speculator=SimpleNamespace(context=SimpleNamespace(counters=counters)),
        execute_model=execute_model,
    )
    worker: Any = SimpleNamespace(model_runner=runner)
    for _ in range(2):
        count_fitted(worker)
    whole = output({"a": 15}, {"p": 9})
    # The end of the context has left fewer nodes than were drafted. That is no cut of ours.
    short = output({"a": 3}, {"p": 9})
    cut, rootless = (output({"a": 15}, {"p": rows}) for rows in (60, 63))
    for step in (whole, short, cut, rootless):
        cut_trees(step, 64)
        assert runner.execute_model(step) == "output"
    assert len(ran) == 4
    assert counters.cut_steps == 2


@pytest.mark.parametrize("connected", [False, True])
def test_who_comes_later_sees_the_cut_step(connected: bool) -> None:
    seen: list[tuple[str, int]] = []

    def count(scheduler_output: Any) -> None:
        seen.append(("requests", scheduler_output.total_num_scheduled_tokens))

    def connect(connector: Any, scheduler_output: Any) -> str:
        seen.append((connector, scheduler_output.total_num_scheduled_tokens))
        return "metadata"

    scheduler: Any = SimpleNamespace(_update_after_schedule=count, _build_kv_connector_meta=connect)
    fit_to_graphs(scheduler, 64)
    step = output({"a": 15, "b": 15}, {"p": 40})
    if connected:
        assert scheduler._build_kv_connector_meta("connector", step) == "metadata"
    scheduler._update_after_schedule(step)
    assert seen == [("connector", 64)] * connected + [("requests", 64)]
