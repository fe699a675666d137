"""Fused blocks give the outputs of the blocks themselves, and are left out if they do not."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import vllm_graft.graph_runners.vision.fused as fused
from tests.support.launches import check_kernels, vision_calls
from tests.support.vision import towers
from tests.support.vision.fake_backend import FakeBackend
from vllm_graft.base.errors import ConfigError
from vllm_graft.graph_runners.vision import captures as passes
from vllm_graft.graph_runners.vision.capture.admission import Admission
from vllm_graft.graph_runners.vision.capture.graph_backend import CaptureStream
from vllm_graft.graph_runners.vision.fused import bit_check as check
from vllm_graft.graph_runners.vision.fused import blocks, side_mergers
from vllm_graft.graph_runners.vision.fused.blocks import FusedBlocks, find_blocks
from vllm_graft.graph_runners.vision.fused.norm_kernel import add_layer_norm, add_rms_norm
from vllm_graft.graph_runners.vision.fused.pointwise_kernels import rotate_qk, silu_mul
from vllm_graft.graph_runners.vision.graphs.graph_store import GraphStore, StoreRules
from vllm_graft.graph_runners.vision.graphs.vision_metrics import VitStats
from vllm_graft.graph_runners.vision.towers import grid_tower
from vllm_graft.graph_runners.vision.towers.grid_tower import GridTower, fused_blocks
from vllm_graft.graph_runners.vision.towers.tower import Tower
from vllm_graft.seams import compare as seams
from vllm_graft.seams.ledger.entry import Seam

WIDTH = 128

BOTH = pytest.mark.parametrize(
    "kind", ["qwen2_5", pytest.param("qwen3", marks=pytest.mark.nightly)], indirect=True
)
"""For tests whose LayerNorms, which qwen3 has, take minutes in the interpreter."""


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether tensors agree as well as they can if the interpreter sums in another order."""
    return torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def wide(kind: str) -> Any:
    return towers.make_model(kind, WIDTH)


@pytest.fixture
def few_rows(monkeypatch: Any) -> None:
    monkeypatch.setattr(check, "ROWS", (20,))


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("width", [128, 520, 1152, 1536])
@pytest.mark.parametrize("added", [False, True])
def test_layer_norm_of_a_sum(width: int, added: bool) -> None:
    x, other, weight, bias = noise(5, 1, width), noise(5, 1, width), noise(width), noise(width)
    total = x + other if added else x
    normed, found = add_layer_norm(x, other if added else None, weight, bias, 1e-6)
    assert torch.equal(found, total)
    assert close(normed, F.layer_norm(total, (width,), weight, bias, 1e-6))


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_rms_norm_of_a_sum(added: bool, rounded: bool) -> None:
    """In bfloat16 it matters whether the sum is rounded before it is normalised."""
    x, other = noise(16, 1, 256, dtype=torch.bfloat16), noise(16, 1, 257)[..., 1:].bfloat16()
    weight = noise(256, dtype=torch.bfloat16)
    exact = x.float() + other.float() if added else x.float()
    normed, total = add_rms_norm(x, other if added else None, weight, 1e-6, rounded)
    assert torch.equal(total, exact.bfloat16())
    summed = exact.bfloat16().float() if rounded else exact
    expected = (F.rms_norm(summed, (256,), None, 1e-6)).bfloat16() * weight
    wrong = normed.ne(expected).float().mean()
    assert wrong < 0.01, f"{wrong:.1%} of the values differ"


def test_rotation_reads_the_projection() -> None:
    rows, heads, size = 7, 3, 12
    qkv, angles = noise(rows, 3 * heads * size), noise(rows, size // 2)
    found = rotate_qk(qkv, angles.cos(), angles.sin(), heads)
    query_key = qkv.view(rows, 3, heads, size)[:, :2].transpose(0, 1)
    left, right = query_key.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    expected = torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)
    assert torch.allclose(found, expected, atol=1e-6)


def test_gate() -> None:
    gate_up = noise(3, 1, 60)
    assert torch.allclose(silu_mul(gate_up), F.silu(gate_up[..., :30]) * gate_up[..., 30:])


def test_blocks_give_what_they_give(wide: Any, few_rows: None) -> None:
    found = check.agreed_blocks(wide, close)
    assert isinstance(found, FusedBlocks)
    assert found.parts == "rotation, norms, gates"
    assert found.blocks == list(wide.visual.blocks)


def test_blocks_are_their_own_afterwards(wide: Any) -> None:
    found = FusedBlocks(find_blocks(wide) or [])
    block = wide.visual.blocks[0]
    with found.installed():
        assert "forward" in vars(block)
        assert find_blocks(wide) is None, "what is installed is not to be installed again"
    assert all("forward" not in vars(block) for block in wide.visual.blocks)
    with pytest.raises(ZeroDivisionError), found.installed():
        raise ZeroDivisionError
    assert all("forward" not in vars(block) for block in wide.visual.blocks)


@torch.inference_mode()
def test_each_sum_is_normalised_once(wide: Any, kind: str, monkeypatch: Any) -> None:
    names = {"qwen3": "add_layer_norm", "qwen2_5": "add_rms_norm"}
    calls = []
    norm = getattr(blocks, names[kind])
    monkeypatch.setattr(blocks, names[kind], lambda *args: calls.append(1) or norm(*args))
    depth = len(wide.visual.blocks)
    x, attention = check._noise(wide.visual.blocks[0], 20)
    with FusedBlocks(find_blocks(wide) or []).installed():
        for block in wide.visual.blocks:
            x = block(x, **attention)
    assert len(calls) == 2 * depth
    with FusedBlocks(find_blocks(wide) or []).installed():
        wide.visual.blocks[0](x, **attention)
        calls.clear()
        # The input is not what the first block returned, so its norm has to be computed.
        wide.visual.blocks[1](x, **attention)
    assert len(calls) == 3


@pytest.mark.parametrize("broken", ["add_layer_norm", "add_rms_norm", "silu_mul", "rotate_qk"])
@torch.inference_mode()
def test_what_has_other_bits_is_left_out(
    broken: str, kind: str, wide: Any, few_rows: None, monkeypatch: Any
) -> None:
    whole = getattr(blocks, broken)

    def wrong(*args: Any) -> Any:
        found = whole(*args)
        return (found[0] * 1.01, found[1]) if isinstance(found, tuple) else found * 1.01

    monkeypatch.setattr(blocks, broken, wrong)
    found = check.agreed_blocks(wide, close)
    refused = "fused kernels have other bits than the blocks' own on this device"
    left = {
        ("add_layer_norm", "qwen3"): "rotation, gates",
        ("add_rms_norm", "qwen2_5"): "rotation, gates",
        ("silu_mul", "qwen2_5"): "rotation, norms",
    }.get((broken, kind), "rotation, norms, gates")
    assert getattr(found, "parts", found) == (refused if broken == "rotate_qk" else left)


def test_ranks_fuse_alike(wide: Any, few_rows: None) -> None:
    asked = []

    def other(ok: bool) -> bool:
        asked.append(ok)
        return len(asked) > 1

    assert getattr(check.agreed_blocks(wide, close, other), "parts", "") == "rotation, norms"
    assert asked == [True, True]


def test_nothing_runs_beside_what_ranks_share(monkeypatch: Any) -> None:
    """Mergers sum over ranks as blocks do, and two sums at a time could run in another order."""
    given = Late()
    for lockstep in (False, True):
        backend = FakeBackend(torch.device("cpu"))
        monkeypatch.setattr(backend, "side_stream", lambda room: given)
        rules = StoreRules(verify=True, timing=True, lockstep=lockstep)
        store = GraphStore(Tower, backend, 1 << 30, Admission(1), VitStats(), rules)  # type: ignore[arg-type]
        assert store.side_stream() is (None if lockstep else given)


def test_few_rows_go_to_the_norm_itself(rank: None, monkeypatch: Any) -> None:
    """torch sums in another order if there are fewer than sixteen rows."""
    model = towers.make_model("qwen2_5", WIDTH)
    monkeypatch.setattr(check, "ROWS", (6,))
    monkeypatch.setattr(blocks, "add_rms_norm", None)
    assert isinstance(check.agreed_blocks(model, torch.equal), str)  # A CPU has no kernels of ours.
    assert isinstance(check.agreed_blocks(model, close), FusedBlocks)


class Late(CaptureStream):
    """A second stream at its slowest: it reads inputs and writes results only at the join."""

    def __init__(self) -> None:
        self.read: list[weakref.ref[torch.Tensor]] = []
        self.owed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.joined = 0

    def run(self, work: Any) -> Any:
        found = work()
        late = torch.full_like(found, float("nan"))
        self.owed.append((late, found))
        return late

    def join(self) -> None:
        assert all(reference() is not None for reference in self.read)
        for late, found in self.owed:
            late.copy_(found)
        self.joined += len(self.owed)
        self.owed.clear()


@torch.inference_mode()
def test_mergers_run_aside(rank: None, monkeypatch: Any) -> None:
    """Merged features are read only after the join, and the mergers' inputs live until then."""
    model = towers.make_model("qwen3", WIDTH)
    visual, late = model.visual, Late()
    found = side_mergers.find_side_mergers(model, lambda: late)
    assert found is not None
    for merger in visual.deepstack_merger_list:
        plain = merger.forward

        def watched(x: torch.Tensor, plain: Any = plain) -> Any:
            late.read.append(weakref.ref(x))
            return plain(x)

        monkeypatch.setitem(vars(merger), "forward", watched)
    inputs = towers.batch("qwen3", [(1, 4, 6)])
    expected = towers.eager(model, inputs)
    late.read.clear()
    with found.installed():
        ours = towers.eager(model, inputs)
    assert late.joined == len(visual.deepstack_merger_list) == len(late.read)
    late.read.clear()
    assert towers.agree(ours, expected, exact=True)
    monkeypatch.setattr(side_mergers, "MOST_ROWS", 16)
    with found.installed():
        ours = towers.eager(model, inputs)
    assert late.joined == len(visual.deepstack_merger_list), "many rows leave nothing to fill"
    assert towers.agree(ours, expected, exact=True)


def test_nothing_runs_aside_where_nothing_can(wide: Any, kind: str) -> None:
    asked = []
    assert side_mergers.find_side_mergers(wide, lambda: asked.append(1)) is None
    assert bool(asked) is (kind == "qwen3"), "a budget is asked for by who has a use for it"


def test_other_blocks_are_not_touched(wide: Any, model: Any) -> None:
    assert find_blocks(object()) is None
    with mock.patch.object(wide.visual.blocks[0], "do_not_compile", False):
        assert find_blocks(wide) is None
    norms = isinstance(model.visual.blocks[0].norm1, torch.nn.LayerNorm)
    assert (find_blocks(model) is not None) is norms, "an RMSNorm of 64 columns is another"


def test_another_vllm_or_a_failed_trial_is_no_error(wide: Any, monkeypatch: Any) -> None:
    moved = Seam("fused", "model_executor.gone.Block", "name", "present", "why", "until")
    monkeypatch.setattr(seams, "LEDGER", (moved,))
    assert "model_executor.gone.Block" in str(fused_blocks(wide, lambda: None, bool))
    monkeypatch.undo()
    fails = mock.Mock(side_effect=RuntimeError("no such kernel"))
    monkeypatch.setattr(check, "find_blocks", fails)
    assert fused_blocks(wide, lambda: None, bool) == "RuntimeError: no such kernel"


def test_asked_for_and_not_there_is_an_error(wide: Any) -> None:
    small = {"max_patches": 64, "buckets": []}
    with pytest.raises(ConfigError, match=r"additional-config\.graft\.vit\.fuse=true, but nothing"):
        towers.make_runner(wide, {"fuse": True, **small})
    for fuse, why in ((None, "the device has no kernels of ours"), (False, "not asked for")):
        runner = towers.make_runner(wide, {"fuse": fuse, **small})
        assert runner.report()["fused"] == f"no: {why}"


def fused_runner(model: Any, monkeypatch: Any, **options: Any) -> Any:
    """A runner on the CPU that fuses all operators that are near enough."""
    monkeypatch.setattr(check, "ROWS", (20,))
    agreed = lambda model, _, agree: check.agreed_blocks(model, close, agree)  # noqa: E731
    monkeypatch.setattr(grid_tower, "fused_blocks", agreed)
    return towers.make_runner(model, {"max_patches": 256, "capture_share": 1, **options})


@BOTH
def test_other_embeddings_end_it(wide: Any, kind: str, monkeypatch: Any) -> None:
    runner = fused_runner(wide, monkeypatch, buckets=[])
    assert runner.report()["fused"] == "rotation, norms, gates"
    monkeypatch.setattr(blocks, "rotate_qk", lambda *args: 1.0001 * rotate_qk(*args))
    inputs = towers.batch(kind, [(1, 4, 6)])
    assert set(towers.prewarm(runner, dict(inputs)).values()) == {"bits"}
    report = runner.report()
    assert report["graphs"]["exact"] == 0
    assert "not bit for bit" in report["fused"]
    assert len(report["failures"]) == 1
    runner.admission.refused.clear()
    assert set(towers.prewarm(runner, dict(inputs)).values()) == {"captured"}
    assert towers.right(runner, inputs, exact=True)


class Stand:
    """A stand-in for fused blocks: it counts passes, and leaves the model's blocks as they are."""

    parts = "norms"

    def __init__(self) -> None:
        self.passes = self.beside = 0
        self.error: Exception | None = None

    @contextmanager
    def installed(self, aside: bool = True) -> Iterator[None]:
        self.passes += 1
        self.beside += aside
        if self.error:
            raise self.error
        yield


OTHER, OURS = 1.0, 0.9


def fused_passes(
    model: Any, monkeypatch: Any, seconds: Sequence[float], same: bool = True
) -> tuple[Any, Stand]:
    """A runner whose timed passes take these seconds, in turns without and with fused blocks."""
    stand = Stand()
    left = [OTHER, *seconds]  # The eager pass of the bucket is timed first.
    monkeypatch.setattr(
        FakeBackend, "timed", lambda self, run: (run(), left.pop(0) if left else 0.0)
    )
    monkeypatch.setattr(passes, "same_bits", lambda *_: same)
    monkeypatch.setattr(passes, "DEFAULT_MAX_PATCHES", 256)
    monkeypatch.setattr(grid_tower, "fused_blocks", lambda *_: stand)
    options = {"max_patches": 64, "buckets": [64], "capture_share": 1}
    return towers.make_runner(model, options), stand


# Per size: the eager pass, ours, and the eager pass again if ours takes more than half of it.
GAIN = (OTHER, OURS, OTHER)
NO_GAIN = (OTHER, 0.98, OTHER)


def test_large_batches_pass_fused(wide: Any, kind: str, monkeypatch: Any) -> None:
    runner, stand = fused_passes(wide, monkeypatch, 2 * GAIN)
    assert runner.report()["fused_passes"] is True
    captured, beside = stand.passes, stand.beside
    inputs = towers.batch(kind, [(1, 8, 16), (1, 4, 4)])
    assert towers.right(runner, inputs, exact=True)
    # Nothing runs beside the blocks, as no graph orders it.
    assert (stand.passes, stand.beside) == (captured + 1, beside)
    assert runner.execute(towers.batch(kind, [(1, 4, 4)])) is not None
    report = runner.report()
    assert report["items"] == {"fused": 2, "bucket": 1}
    assert (report["declines"], report["failures"]) == ({}, [])
    # Once fusing ends, such batches are left to the engine again.
    runner.tower.unfuse("a graph had other bits")
    assert runner.execute(dict(inputs)) is None
    assert runner.report()["declines"] == {"too_large": 1}
    assert runner.report()["fused_passes"] is False


@pytest.mark.parametrize(
    ("seconds", "same"), [(NO_GAIN, True), (GAIN + NO_GAIN, True), (2 * GAIN, False)]
)
def test_passes_that_gain_nothing_or_differ_are_not_fused(
    wide: Any, kind: str, monkeypatch: Any, seconds: tuple[float, ...], same: bool
) -> None:
    runner, stand = fused_passes(wide, monkeypatch, seconds, same)
    report, tried = runner.report(), stand.passes
    assert (report["fused"], report["fused_passes"]) == ("norms", False)
    assert runner.execute(towers.batch(kind, [(1, 8, 16)])) is None
    assert stand.passes == tried


def test_passes_that_fail_at_first_are_not_fused(wide: Any, kind: str, monkeypatch: Any) -> None:
    """The engine starts even if there is no memory for these passes, for example."""
    honest = GridTower.eager

    def eager(self: Any, inputs: Any, indices: Any) -> Any:
        if sum(item.rows for item in self.items(inputs)) > 64:
            raise torch.OutOfMemoryError("no room")
        return honest(self, inputs, indices)

    monkeypatch.setattr(GridTower, "eager", eager)
    runner, _ = fused_passes(wide, monkeypatch, 2 * GAIN)
    report = runner.report()
    assert report["fused_passes"] is False
    assert report["graphs"]["bucket"] == 1
    assert "no room" in report["failures"][0]
    assert runner.execute(towers.batch(kind, [(1, 8, 16)])) is None


def test_a_failed_fused_pass_is_the_engines(wide: Any, kind: str, monkeypatch: Any) -> None:
    runner, stand = fused_passes(wide, monkeypatch, 2 * GAIN)
    stand.error = RuntimeError("out of something")
    assert runner.execute(towers.batch(kind, [(1, 8, 16)])) is None
    assert runner.report()["declines"] == {"error": 1}
    assert "out of something" in runner.report()["failures"][0]


@BOTH
def test_padded_graphs_are_fused(wide: Any, kind: str, monkeypatch: Any) -> None:
    runner = fused_runner(wide, monkeypatch, buckets=[32])
    assert runner.report()["graphs"]["bucket"] == 1
    inputs = towers.batch(kind, [(1, 2, 6), (1, 2, 4)])
    found = runner.execute(dict(inputs))
    assert runner.report()["items"]["bucket"] == 2
    assert all(map(close, found, towers.eager(wide, inputs)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(each, marks=pytest.mark.nightly) for each in (80, 100))]
)
def test_every_kernel_compiles(capability: int) -> None:
    check_kernels(fused, vision_calls.calls(), capability)
