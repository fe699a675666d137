"""The course of a head that learns: what each load told, and the medians of phases."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import shift
from benchmarks.real_pair.cells import Cell
from tests.support.engines.vllm_server import SpecDecodeCounters

PAGE = """vllm:spec_decode_num_drafts_total {drafts}
vllm:spec_decode_num_accepted_tokens_total {accepted}
vllm:graft_learn_head {head}
vllm:graft_learn_head_swaps_total {head}
"""


def test_a_row_is_of_its_load_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = iter([(100, 100, 0), (110, 120, 0), (110, 120, 1), (120, 150, 1)])

    def page() -> str:
        drafts, accepted, head = next(pages)
        return PAGE.format(drafts=drafts, accepted=accepted, head=head)

    asked = list[tuple[int, int]]()

    def measured(server: Any, load: Any, cell: Cell, requests: int, seed: int) -> Any:
        asked.append((requests, seed))
        return SimpleNamespace(tokens=100.0 * len(asked), itl_p99=9.0)

    monkeypatch.setattr(shift, "measure", measured)
    server: Any = SimpleNamespace(metrics=page, counters=lambda: SpecDecodeCounters.parse(page()))
    load: Any = SimpleNamespace()
    course = shift.Course(server, load, requests=5)
    for phase in ("edits", "training"):
        course.cell(phase, Cell(0.0, 4, workload="edits"))
    # Each load asks for others.
    assert asked == [(5, 0), (5, 1)]
    assert [row["tokens_per_tree"] for row in course.rows] == [3.0, 4.0]
    assert [row["head_swaps"] for row in course.rows] == [0, 1]
    found = course.summary()
    assert found["edits"]["tokens_per_second"] == 100.0
    assert found["training"] == found["training, last quarter"]


def test_what_follows_two_dashes_is_the_trainer_s(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[Any]()
    monkeypatch.setattr(shift, "run", told.append)
    shift.main(["pair", "--minutes", "2", "--max-num-seqs", "4", "--", "--rounds", "1"])
    [read] = told
    assert read.minutes == 2.0
    assert read.server_flags == ["--max-num-seqs", "4"]
    assert read.learner == ["--rounds", "1"]
