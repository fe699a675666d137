import pytest
import torch

from tests.support.simulated_streams import simulated

if torch.cuda.is_available():
    pytest.skip("stands for CUDA streams where there are none", allow_module_level=True)


@pytest.fixture(autouse=True)
def simulator():
    with simulated():
        yield


class Loader:
    """A loader of layers on a side stream; the main stream reads each. A flag plants a bug."""

    def __init__(self, bug=None):
        self.bug = bug
        self.stream = torch.cuda.Stream()
        self.host = [torch.full((4,), float(layer + 1)) for layer in range(3)]
        self.device = [torch.zeros(4) for _ in range(3)]
        self.events = [torch.cuda.Event() for _ in range(3)]

    def run(self):
        with torch.cuda.stream(self.stream):
            for source, target, event in zip(self.host, self.device, self.events):
                target.copy_(source, non_blocking=True)
                event.record(self.stream)
        sums = []
        for layer, target in enumerate(self.device):
            if self.bug == "wrong event":
                self.events[max(0, layer - 1)].wait()
            elif self.bug != "no wait":
                torch.cuda.current_stream().wait_event(self.events[layer])
            sums.append(float(target.sum()))
        return sums


def test_right_order_passes():
    assert Loader().run() == [4.0, 8.0, 12.0]


@pytest.mark.parametrize("bug", ["no wait", "wrong event"])
def test_planted_bug_shows(bug):
    assert Loader(bug).run() != [4.0, 8.0, 12.0]


@pytest.mark.parametrize(("waits", "saved"), [(True, 1.0), (False, 9.0)])
def test_block_reused_before_it_is_written_back(waits, saved):
    block, backup, copies = torch.ones(4), torch.zeros(4), torch.cuda.Stream()
    with torch.cuda.stream(copies):
        backup.copy_(block)
    if waits:
        torch.cuda.current_stream().wait_stream(copies)
    block.fill_(9.0)
    copies.synchronize()
    assert torch.equal(backup, torch.full((4,), saved))


def test_result_of_pending_work_is_nan():
    side = torch.cuda.Stream()
    with side:
        out = torch.ones(4) * 2
    assert out.isnan().all()
    assert not side.query()
    side.synchronize()
    assert torch.equal(out, torch.full((4,), 2.0))


def test_side_stream_waits_for_another():
    first, second, x = torch.cuda.Stream(), torch.cuda.Stream(), torch.zeros(1)
    with torch.cuda.stream(first):
        x.add_(1)
    second.wait_stream(first)
    with torch.cuda.stream(second):
        x.mul_(10)
    second.synchronize()
    assert x.item() == 10


def test_kernel_launch_is_deferred():
    import triton
    import triton.language as tl

    @triton.jit
    def fill(out, N: tl.constexpr):
        tl.store(out + tl.arange(0, N), 5.0)

    side, out = torch.cuda.Stream(), torch.zeros(4)
    with torch.cuda.stream(side):
        fill[(1,)](out, N=4)
    assert not out.any()
    torch.cuda.synchronize()
    assert torch.equal(out, torch.full((4,), 5.0))


def test_item_on_the_side_stream_waits_for_it():
    side, x = torch.cuda.Stream(), torch.zeros(1)
    with torch.cuda.stream(side):
        x.add_(3)
        assert x.item() == 3
