"""The cost of captures while an engine serves, and the work of a captured region."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.vision import towers
from vllm_graft.graph_runners.vision import captures, route
from vllm_graft.graph_runners.vision import runner as runner_module

SMALL = {"max_patches": 256, "buckets": [64, 128, 256], "capture_share": 1}


@pytest.fixture(scope="module", params=["qwen3"])
def kind(request: pytest.FixtureRequest, rank: None) -> str:
    return str(request.param)


class Clock:
    """A clock that moves only when a test moves it."""

    def __init__(self) -> None:
        self.now = 50.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


def test_captures_take_less_than_their_share_of_a_stream(
    kind: str, model: Any, monkeypatch: Any
) -> None:
    clock = Clock()
    for module in (runner_module, route, captures):
        monkeypatch.setattr(module, "time", clock)
    runner = towers.make_runner(model, {**SMALL, "capture_share": 0.019})
    capture = runner.store.capture_exact

    def slow(*args: Any) -> str | None:
        clock.now += 0.04
        return capture(*args)

    monkeypatch.setattr(runner.store, "capture_exact", slow)
    popular, rest = [(1, 8, 8)], [[(1, 4, 2 * width)] for width in range(2, 12)]
    begun = clock.now
    for number in range(160):
        grids = popular if number % 2 else rest[number // 2 % len(rest)]
        assert runner.execute(towers.batch(kind, grids)) is not None
        clock.now += 0.05
        assert runner.stats.capture_seconds <= 0.02 * (clock.now - begun)
    found = runner.report()
    assert found["captures"]["exact"] == 3
    # The first capture is that of the layout that half of the batches have.
    first: Any = next(iter(runner.store.exact))[0]
    assert first[1:4] == popular[0]
    assert found["items"]["exact"] > 50
    # Each batch that a graph was captured with was answered by the eager pass.
    assert (found["items"]["eager"], found["declines"]) == (3, {})


def test_the_exact_region_computes_nothing_from_layouts(kind: str, model: Any) -> None:
    """A region computes only from pixels; positions, rotations and offsets are computed before."""
    runner = towers.make_runner(model, SMALL)
    towers.prewarm(runner, towers.batch(kind, [(1, 8, 8)]))
    (graph,) = runner.store.exact.values()
    with torch.inference_mode(), Idle(graph.buffers["pixel_values"]) as mode:
        runner.tower.forward(graph.buffers)
    assert mode.calls > 100
    assert mode.idle == []
    # Negative control: the probe finds such work if there is some.
    with torch.inference_mode(), Idle(graph.buffers["pixel_values"]) as mode:
        runner.tower.forward({**graph.buffers, "pos_embeds": graph.buffers["pos_embeds"] * 1.0})
    assert mode.idle == ["aten.mul.Tensor"]


class Idle(TorchDispatchMode):
    """Finds operators that write a new tensor without reading anything that depends on `data`."""

    def __init__(self, data: torch.Tensor) -> None:
        super().__init__()
        self.calls = 0
        self.idle: list[str] = []
        self._hot = {storage(data)}
        self._kept: list[Any] = []  # Keeps tensors alive, so that no address is reused.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given, made = tensors((args, kwargs)), tensors(found)
        self._kept.append(made)
        self.calls += 1
        if any(storage(tensor) in self._hot for tensor in given):
            self._hot.update(map(storage, made))
            # oneDNN's products write to an argument although their schemas do not say so.
            if func.namespace == "_C":
                self._hot.update(map(storage, given))
        elif {storage(one) for one in made} - {storage(one) for one in given} and (
            func.overloadpacket is not torch.ops.aten.empty
        ):
            self.idle.append(str(func))
        return found


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
