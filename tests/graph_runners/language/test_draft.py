"""Graphs of the draft's levels: the sizes that are captured, and the one that serves a batch."""

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.v1.worker.gpu import cudagraph_utils

from tests.support import cuda_graphs
from tests.support import simulated_streams as streams
from tests.support.vllm_configs import captured_config
from vllm_graft.graph_runners.language import draft
from vllm_graft.graph_runners.language.draft import (
    DraftGraphRunner,
    EagerDraftRunner,
    VerifyingDraftRunner,
    one_capture_stream,
)
from vllm_graft.graph_runners.language.widths import request_counts

TOPK = 4


@pytest.fixture
def make_runner(lone_rank: None) -> Any:

    def make(
        mode: CUDAGraphMode,
        cls: type[DraftGraphRunner] = DraftGraphRunner,
        capture_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32),
    ) -> Any:
        return cls(captured_config(list(capture_sizes)), torch.device("cpu"), mode, TOPK)

    return make


FULL = CUDAGraphMode.FULL_DECODE_ONLY


def test_levels_are_captured_where_decodes_are() -> None:
    without = {CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE}
    for mode in CUDAGraphMode:
        assert DraftGraphRunner.resolve(mode) == (CUDAGraphMode.NONE if mode in without else FULL)
        assert EagerDraftRunner.resolve(mode) == CUDAGraphMode.NONE


def sizes(runner: Any) -> list[int]:
    """Return the requests of each graph to capture, in order."""
    descs = runner._capture_descs.get(CUDAGraphMode.FULL, [])
    assert all(desc.num_tokens == desc.num_reqs * TOPK for desc in descs)
    return [desc.num_reqs for desc in descs]


def test_sizes_are_whole_requests_the_largest_first(make_runner: Any) -> None:
    # 32 rows would be eight requests, of which the engine has six.
    assert sizes(make_runner(CUDAGraphMode.FULL_AND_PIECEWISE)) == [4, 2, 1]
    assert sizes(make_runner(CUDAGraphMode.PIECEWISE)) == []
    assert sizes(make_runner(CUDAGraphMode.FULL_AND_PIECEWISE, EagerDraftRunner)) == []


@pytest.fixture
def said(monkeypatch: Any) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(draft, "warning_once", found.append)
    return found


def test_sizes_that_fit_no_batch_are_named(make_runner: Any, said: list[str]) -> None:
    make_runner(CUDAGraphMode.FULL_AND_PIECEWISE)
    make_runner(CUDAGraphMode.PIECEWISE)
    assert not said
    make_runner(CUDAGraphMode.FULL_AND_PIECEWISE, capture_sizes=[32])
    assert "cudagraph_capture_sizes [32]" in said[0]
    assert "add sizes from 4 to 24" in said[0]


def dispatch(runner: Any, num_reqs: int, rows: int = 0) -> Any:
    """The graph of a batch, once graphs are captured."""
    runner._graphs_captured = True
    return runner.dispatch(num_reqs, rows or num_reqs * TOPK, TOPK, num_active_loras=0)


def test_batch_sizes_of_a_graph(make_runner: Any) -> None:
    runner = make_runner(CUDAGraphMode.FULL_AND_PIECEWISE)
    assert [list(runner.batch_sizes(size)) for size in (1, 2, 4)] == [[1], [2], [3, 4]]
    for num_reqs in (1, 2, 3, 4):
        assert num_reqs in runner.batch_sizes(dispatch(runner, num_reqs).num_reqs)


def test_levels_are_captured_at_each_size(make_runner: Any, monkeypatch: Any) -> None:
    def capture(self: Any, create: Any, title: str) -> None:
        for desc in self._capture_descs[CUDAGraphMode.FULL]:
            create(desc, warmup=True)(CUDAGraphMode.NONE)

    monkeypatch.setattr(cudagraph_utils.CudaGraphManager, "capture", capture)
    drafted: list[int] = []
    make_runner(FULL).capture_levels(drafted.append)
    assert drafted == [4, 2, 1]


def test_managers_share_a_capture_stream(monkeypatch: Any) -> None:
    """One stream's capture cannot reuse memory of another stream's capture."""
    contexts: list[Any] = []

    @contextlib.contextmanager
    def entered(context: Any) -> Iterator[None]:
        contexts.append(context)
        yield

    group = SimpleNamespace(graph_capture=entered)
    for name in ("get_tp_group", "get_pp_group", "get_dp_group"):
        monkeypatch.setattr(parallel_state, name, lambda: group)
    device = torch.device("cpu")

    def captured_on() -> list[Any]:
        contexts.clear()
        for _ in range(2):
            with cudagraph_utils.graph_capture(device=device) as context:
                assert contexts[-3:] == [context] * 3
        return [contexts[0].stream, contexts[-1].stream]

    with streams.simulated():
        with one_capture_stream(device):
            first, second = captured_on()
        assert first is second
        # Afterwards vLLM's own way is back.
        third, fourth = captured_on()
        assert len({id(stream) for stream in (first, third, fourth)}) == 3


def test_a_capture_that_fails_leaves_vllm_as_it_was() -> None:
    stock = parallel_state.GraphCaptureContext
    with streams.simulated():
        with pytest.raises(KeyError), one_capture_stream(torch.device("cpu")):
            raise KeyError("what a capture may raise")
        assert parallel_state.GraphCaptureContext is stock


@pytest.mark.parametrize(("num_reqs", "padded"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, None)])
def test_a_batch_takes_the_next_size(make_runner: Any, num_reqs: int, padded: int | None) -> None:
    runner = make_runner(FULL)
    options = {"uniform_token_count": TOPK, "num_active_loras": 0}
    assert runner.dispatch(num_reqs, num_reqs * TOPK, **options).cg_mode == CUDAGraphMode.NONE
    desc = dispatch(runner, num_reqs)
    assert desc.cg_mode == (CUDAGraphMode.FULL if padded else CUDAGraphMode.NONE)
    assert desc.num_tokens == (padded or num_reqs) * TOPK
    assert padded in (None, desc.num_reqs)


def test_sizes_that_serve_no_wanted_batch_are_dropped(make_runner: Any) -> None:
    runner = make_runner(CUDAGraphMode.FULL_AND_PIECEWISE)
    runner.keep_sizes([1, 3])
    assert sizes(runner) == [4, 1]
    # Two requests take the graph of no other size: they run without one.
    left = {desc.num_reqs for descs in runner._candidates.values() for desc in descs}
    assert left == {4, 1}
    runner.keep_sizes([])
    assert sizes(runner) == []
    assert not any(runner._candidates.values())


def test_counts_whatever_the_engine_s_sizes(make_runner: Any) -> None:
    runner = make_runner(CUDAGraphMode.FULL_AND_PIECEWISE)
    runner.plan_counts([1, 3, 5])
    assert sizes(runner) == [5, 3, 1]
    assert [dispatch(runner, num_reqs).num_reqs for num_reqs in range(1, 6)] == [1, 3, 3, 5, 5]


def test_at_most_a_third_is_padding() -> None:
    assert request_counts(0) == []
    assert request_counts(1) == [1]
    assert request_counts(100)[-2:] == [96, 100]
    for largest in (7, 100, 512):
        counts = request_counts(largest)
        assert counts[-1] == largest
        for batch in range(1, largest + 1):
            serving = min(count for count in counts if count >= batch)
            assert serving - batch <= serving / 3


class Doubling:
    """A pass over static tensors, of which a graph was captured."""

    def __init__(self, runner: Any, num_reqs: int, stale: bool = False) -> None:
        self.runner = runner
        self.inputs, self.drafts = torch.zeros(6), torch.zeros(6)
        self.desc = dispatch(runner, num_reqs)
        self.launches = 0
        graph = cuda_graphs.CUDAGraph()
        with cuda_graphs.graph(graph):
            torch.mul(self.inputs, 2, out=self.drafts)
        runner.graphs[self.desc] = graph
        if stale:
            self.inputs = self.inputs.clone()

    def launch(self) -> None:
        self.launches += 1
        torch.mul(self.inputs, 2, out=self.drafts)

    def draft(self, value: float, num_reqs: int = 3) -> list[float]:
        self.inputs.fill_(value)
        desc = dispatch(self.runner, num_reqs)
        if desc.cg_mode == CUDAGraphMode.FULL:
            self.runner.replay(desc, self.launch, lambda: [self.drafts[:num_reqs].clone()])
        else:
            self.launch()
        drafts: list[float] = self.drafts[:num_reqs].tolist()
        return drafts


def test_the_first_replay_of_a_size_is_compared(make_runner: Any) -> None:
    doubling = Doubling(make_runner(FULL, VerifyingDraftRunner), 4)
    assert [doubling.draft(step) for step in (1, 2, 3)] == [[2] * 3, [4] * 3, [6] * 3]
    assert doubling.launches == 1
    assert doubling.runner.graphs[doubling.desc].replays == 3
    assert doubling.runner.checks() == {"verified": [4], "differing": []}


def test_a_graph_with_a_stale_input_is_never_believed(make_runner: Any, said: list[str]) -> None:
    doubling = Doubling(make_runner(FULL, VerifyingDraftRunner), 4, stale=True)
    assert [doubling.draft(step) for step in (1, 2, 3)] == [[2] * 3, [4] * 3, [6] * 3]
    assert doubling.launches == 3
    assert doubling.runner.graphs[doubling.desc].replays == 1
    assert doubling.runner.checks() == {"verified": [], "differing": [4]}
    assert "graph of 4 requests (16 rows)" in said[0]
    # Other sizes keep their graphs.
    assert dispatch(doubling.runner, 2).num_reqs == 2


def test_a_graph_that_another_rank_refuses_is_launched(make_runner: Any, monkeypatch: Any) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(draft, "all_ranks_agree", lambda own: bool(asked.append(own)))
    doubling = Doubling(make_runner(FULL, VerifyingDraftRunner), 4)
    assert [doubling.draft(step) for step in (1, 2, 3)] == [[2] * 3, [4] * 3, [6] * 3]
    assert asked == [True]
    assert doubling.launches == 3
    assert doubling.runner.checks() == {"verified": [], "differing": [4]}


def test_the_other_runners_check_nothing(make_runner: Any) -> None:
    doubling = Doubling(make_runner(FULL), 4)
    assert doubling.draft(5) == [10.0] * 3
    assert doubling.launches == 0
    assert doubling.runner.checks() == {}
