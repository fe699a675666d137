import numpy as np
import pytest
import torch

from tests.support.cuda_graphs import CaptureError, recording

if torch.cuda.is_available():
    pytest.skip("stands for CUDA graphs where there are none", allow_module_level=True)

INPUTS = [torch.full((4,), float(i)) for i in (1, 2, 3)]


class Runner:
    """A runner that computes ``2 * x + 1`` in a graph; a flag plants a bug."""

    def __init__(self, pool=None, bug=None):
        self.bug = bug
        self.x = torch.zeros(4)
        self.scale = 2.0
        self.out = torch.zeros(4)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.private = self.x * self.scale + 1
            self.out.copy_(self.private)

    def __call__(self, x):
        if self.bug == "rebound input":
            self.x = x.clone()
        else:
            self.x.copy_(x)
        self.graph.replay()
        if self.bug == "pool memory":
            return self.private
        return self.out if self.bug == "no clone" else self.out.clone()


@pytest.fixture(autouse=True)
def stand_in():
    with recording():
        yield


def results(runner):
    return [runner(x) for x in INPUTS]


def correct(outputs):
    return all(torch.equal(out, 2 * x + 1) for out, x in zip(outputs, INPUTS))


def test_replay_reads_new_inputs_at_the_captured_addresses():
    runner = Runner()
    assert correct(results(runner))
    assert runner.graph.replays == 3
    assert len(runner.graph) == 3


@pytest.mark.parametrize("bug", ["rebound input", "no clone", "pool memory"])
def test_planted_bug_shows(bug):
    assert not correct(results(Runner(bug=bug)))


def test_new_python_scalar_is_not_seen_by_a_replay():
    runner = Runner()
    runner.scale = 5.0
    assert correct(results(runner))


def test_replay_of_another_graph_of_the_pool_overwrites_a_private_result():
    pool = torch.cuda.graph_pool_handle()
    first, second = Runner(pool, "pool memory"), Runner(pool)
    held = first(INPUTS[0])
    assert torch.equal(held, 2 * INPUTS[0] + 1)
    second(INPUTS[1])
    assert held.isnan().all()


def test_graph_of_another_pool_leaves_it_alone():
    first, second = Runner(bug="pool memory"), Runner()
    held = first(INPUTS[0])
    second(INPUTS[1])
    assert torch.equal(held, 2 * INPUTS[0] + 1)


def test_uninitialised_memory_is_poison():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scratch, zeros = torch.empty(3), torch.zeros(3)
    scratch.fill_(1.0)
    graph.replay()
    assert scratch.isnan().all()
    assert torch.equal(zeros, torch.zeros(3))


SYNCHRONISING = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: x * float(x.sum()),
    "branch": lambda x: 1 if x.sum() > 0 else 0,
    "mask index": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "unique": lambda x: x.unique(),
    "synchronize": lambda x: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("name", SYNCHRONISING)
def test_synchronisation_under_capture_is_refused(name):
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match="not permitted"), torch.cuda.graph(graph):
        SYNCHRONISING[name](torch.ones(4))
    assert not torch.cuda.is_current_stream_capturing()
    with pytest.raises(CaptureError, match="reset or never captured"):
        graph.replay()


def test_python_operator_is_opened_and_its_launches_are_recorded():
    import triton
    import triton.language as tl

    @triton.jit
    def double(x, out, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(out + i, tl.load(x + i) * 2)

    library = torch.library.Library("vllm", "FRAGMENT")
    library.define("graft_test_op(Tensor x, Tensor(a!) out) -> ()")

    def python_operator(x, out):
        double[(1,)](x + 1, out, N=4)

    library.impl("graft_test_op", python_operator, "CPU")
    x, out = torch.zeros(4), torch.zeros(4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.vllm.graft_test_op(x, out)
    assert len(graph) == 2
    x.fill_(3.0)
    graph.replay()
    assert torch.equal(out, torch.full((4,), 8.0))


def test_replay_under_capture_and_nested_capture_are_refused():
    runner, graph = Runner(), torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match="while a graph"), torch.cuda.graph(graph):
        runner.graph.replay()
    with pytest.raises(CaptureError, match="already"), torch.cuda.graph(graph):
        torch.cuda.CUDAGraph().capture_begin()


def test_recording_is_undone():
    outer = torch.cuda.CUDAGraph, torch.Tensor.tolist
    with recording():
        assert torch.Tensor.tolist is not outer[1]
    assert (torch.cuda.CUDAGraph, torch.Tensor.tolist) == outer


def test_the_host_s_own_arithmetic_is_no_part_of_a_capture():
    starts = np.arange(4)
    buffer = torch.zeros(4)
    with recording():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ends = (torch.from_numpy(starts).int() + torch.from_numpy(starts).int()).numpy()
            buffer.add_(int(ends[-1]))
        assert ends.tolist() == [0, 2, 4, 6]
        assert len(graph) == 1
        starts += 1
        graph.replay()
        assert buffer.tolist() == [12.0] * 4
        again = torch.cuda.CUDAGraph()
        with pytest.raises(CaptureError, match=r"numpy\(\)"), torch.cuda.graph(again):
            (buffer + torch.from_numpy(starts)).numpy()
