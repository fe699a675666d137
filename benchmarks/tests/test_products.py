"""Products: kernels in the interpreter, their code for sm_90, and a search by a fake clock."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.products import __main__ as command
from benchmarks.products import report, search, smoke
from benchmarks.products.chain import Chain
from benchmarks.products.compiled import order_of
from benchmarks.products.findings import FoundProduct, FoundRows, Tried
from benchmarks.products.plan import (
    Plan,
    ahead_of,
    first_plans,
    fits,
    grid_of,
    later_plans,
)
from benchmarks.products.product_call import RELATIVE, Space, multiply
from benchmarks.products.search import Search
from benchmarks.products.shapes import LLAMA_8B, Buffers, Layer, Product
from benchmarks.products.small_kernels import EPSILON
from benchmarks.products.timing import Launches, copy_rate

TINY = Layer(hidden=128, query=128, key=64, inner=64)
SMALL = Product("small", 192, 256)
FLAT = Plan(False, 64, 64, 3, 4, overlapped=False)
PLANS = [
    FLAT,
    FLAT._replace(flip=False, tile=32),
    FLAT._replace(splits=3),
    FLAT._replace(resident=1, flip=False),
    FLAT._replace(resident=2, step=32),
]


def product(plan: Plan, rows: int, multiprocessors: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """What a plan computes, and what float32 does."""
    random = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, SMALL.depth, generator=random).to(torch.bfloat16)
    weight = torch.randn(SMALL.columns, SMALL.depth, generator=random).to(torch.bfloat16)
    out = torch.full((rows, SMALL.columns), float("nan"), dtype=torch.bfloat16)
    space = Space.allocate((SMALL,), multiprocessors, "cpu")
    multiply(plan, SMALL, x, weight, out, space)
    assert not space.arrived.any()
    return out.float(), x.float() @ weight.float().t()


@pytest.mark.parametrize("plan", [*PLANS, None], ids=lambda plan: plan.short if plan else "cublas")
def test_products_are_those_of_float32(plan: Plan | None) -> None:
    for rows in (1, 5, 17):
        if plan is None:
            x, weight = torch.ones(rows, 256).bfloat16(), torch.ones(192, 256).bfloat16()
            out = torch.empty(rows, 192).bfloat16()
            multiply(None, SMALL, x, weight, out, Space.allocate((SMALL,), 5, "cpu"))
            assert torch.equal(out, torch.full((rows, 192), 256.0).bfloat16())
            continue
        out, expected = product(plan, rows)
        assert (out - expected).norm() <= RELATIVE * expected.norm()
        # A sum that misses one step is found.
        assert (out - expected * (1 - 1 / 16)).norm() > RELATIVE * expected.norm()


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.short)
def test_each_step_belongs_to_one_program(plan: Plan) -> None:
    grid = grid_of(plan, SMALL, 5)
    total = SMALL.columns // plan.tile * (SMALL.depth // plan.step)
    assert (grid.programs - 1) * grid.share < total <= grid.programs * grid.share
    assert grid.slots in (0, 2 * grid.programs)
    if plan.resident:
        assert grid.programs <= 5 * plan.resident


def test_a_failure_of_a_small_product_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = tuple(
        plan._replace(overlapped=False, ahead=0, roll=False) for plan in smoke.PLANS["tile"]
    )
    monkeypatch.setattr(smoke, "PRODUCT", SMALL)
    monkeypatch.setattr(smoke, "PLANS", {"tile": flat})
    assert smoke.failures("tile", "cpu", (3,)) == []
    monkeypatch.setattr(smoke, "RELATIVE", 0.0)
    assert all("relative error" in each for each in smoke.failures("tile", "cpu", (3,)))
    monkeypatch.setattr(smoke, "multiply", lambda *_: 1 / 0)
    assert all("ZeroDivisionError" in each for each in smoke.failures("tile", "cpu", (3,)))


def test_a_process_that_does_not_end_is_ended() -> None:
    def process(code: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    assert smoke.result(process("import time; time.sleep(60)"), 0.2) == ["did not end within 0 s"]
    assert smoke.result(process("print('x'); print('[]')")) == []
    assert smoke.result(process("print('[\"why\"]')")) == ["why"]
    assert "status 1" in smoke.result(process("raise ValueError('bad')"))[0]


def reference(buffers: Buffers, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The chain in PyTorch, rounded to bfloat16 where the kernels round."""
    layer = buffers.layer

    def norm(value: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt((value * value).mean(-1, keepdim=True) + EPSILON)
        return (value * scale * buffers.gain.float()).bfloat16().float()

    def times(value: torch.Tensor, name: str, number: int) -> torch.Tensor:
        return (value @ buffers.weights[name][number].float().t()).bfloat16().float()

    residual, delta = buffers.rows("start", rows).float(), torch.zeros(rows, layer.hidden)
    for number in range(buffers.layers):
        total = residual + delta
        residual = total.bfloat16().float()
        qkv = times(norm(total), "qkv", number)
        heads = layer.query // layer.key
        query, key, value = qkv.split([layer.query, layer.key, layer.key], -1)
        size = min(128, layer.key)
        key, value = (
            each.view(rows, -1, size).repeat_interleave(heads, 1).reshape(rows, -1)
            for each in (key, value)
        )
        delta = times((query + 0.25 * (key + value)).bfloat16().float(), "o", number)
        total = residual + delta
        residual = total.bfloat16().float()
        gate, up = times(norm(total), "gate_up", number).chunk(2, -1)
        delta = times((torch.nn.functional.silu(gate) * up).bfloat16().float(), "down", number)
    return delta, residual


def test_a_chain_is_that_of_pytorch() -> None:
    buffers = Buffers(TINY, 2, 8, "cpu")
    space = Space.allocate(TINY.products, 5, "cpu")
    chain = Chain(buffers, 5, space, overlapped=False)
    expected, residual = reference(buffers, 5)
    for plan in (None, FLAT._replace(splits=2, step=32)):
        chain.whole(dict.fromkeys(buffers.weights, plan))
        assert (buffers.rows("delta", 5).float() - expected).norm() <= 0.02 * expected.norm()
        assert (buffers.rows("residual", 5).float() - residual).norm() <= 0.02 * residual.norm()
    # Weights of another layer are noticed.
    buffers.weights["o"][1] = buffers.weights["o"][0]
    chain.whole(dict.fromkeys(buffers.weights, None))
    assert (buffers.rows("delta", 5).float() - expected).norm() > 0.1 * expected.norm()


class FakeClock:
    """Runs launches once; each takes less than the one before."""

    def __init__(self) -> None:
        self.calls = 0

    def captured(self, launches: Launches) -> Launches:
        return launches

    def time(self, launches: Launches, repeats: int) -> float:
        launches()
        self.calls += 1
        return 1000.0 - self.calls

    def compare(self, arms: Mapping[str, Launches], rounds: int) -> dict[str, float]:
        return {name: self.time(launches, rounds) for name, launches in arms.items()}


def tiny_search(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Search:
    plans = [FLAT._replace(step=32), FLAT._replace(step=32, splits=2)]
    monkeypatch.setattr(search, "first_plans", lambda *_: plans)
    monkeypatch.setattr(search, "VARIED", 1)
    buffers = Buffers(TINY, 1, 4, "cpu")
    space = Space.allocate(TINY.products, 5, "cpu")
    return Search(buffers, space, clock, None, 1e9, overlapped=False)


def test_all_rows_are_searched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny_search(FakeClock(), monkeypatch)
    file = tmp_path / "products.json"
    found = command.run(made, [3], time.monotonic() + 600, file, {"device": "none"})
    written = json.loads(file.read_text())
    assert [each["rows"] for each in written["rows"]] == [3]
    [rows] = found
    assert set(rows.arms) == {"cublas", "cublas+small pdl", "ours"}
    assert all(rows.same.values())
    assert all(error < 0.02 for error in rows.errors.values())
    for each in rows.products.values():
        assert len(each.tried) > 2
        assert [one.failure for one in each.tried] == [""] * len(each.tried)
        assert each.best(overlapped=False) is not None
        assert each.best(overlapped=True) is None
    assert "nothing to decide by" in capsys.readouterr().out


def test_a_plan_that_computes_wrongly_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tiny_search(FakeClock(), monkeypatch)
    right = multiply

    def wrong(plan: Plan | None, *arguments: object) -> None:
        right(plan, *arguments)  # type: ignore[arg-type]
        if plan is not None:
            arguments[3].mul_(1.1)  # type: ignore[attr-defined]

    monkeypatch.setattr(search, "multiply", wrong)
    found = made.run(3, time.monotonic() + 600)
    for each in found.products.values():
        assert each.ranked(overlapped=False) == []
        assert all(one.failure.startswith("relative error") for one in each.tried)


def test_a_deadline_leaves_plans_out(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tiny_search(FakeClock(), monkeypatch)
    found = made.run(3, 0.0)
    assert [each.tried for each in found.products.values()] == [[]] * 4


@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64, 128])
def test_plans_fit_a_gpu(rows: int) -> None:
    for each in LLAMA_8B.products:
        plans = first_plans(each, rows, 132)
        assert {plan.kind for plan in plans} == {"tile", "deep"}
        for plan in [*plans, *later_plans(plans[0], each, rows, 132)]:
            assert fits(plan, each, rows, 132)
            assert plan.ahead & (plan.ahead - 1) == 0
    assert not fits(FLAT._replace(stages=99), LLAMA_8B.products[0], rows, 132)
    assert not fits(FLAT._replace(step=96), LLAMA_8B.products[0], rows, 132)
    assert ahead_of(FLAT, 5 * 64 * 64 * 2) == 4


def timed(us: float, plan: Plan) -> Tried:
    return Tried(plan, us, 0.001)


def test_a_verdict_needs_a_faster_product_or_layer() -> None:
    gate_up = FoundProduct(LLAMA_8B.products[2], 70.0, 69.0, 4.0, [timed(67.0, FLAT)])
    found = FoundRows(32, {"gate_up": gate_up}, {"cublas": 130.0, "ours+pdl": 128.0})
    found.same = {"cublas": True, "ours+pdl": True}
    assert "nothing to decide" in report.verdict(found)
    early = FLAT._replace(overlapped=True)
    gate_up.tried = [timed(67.0, early)]
    assert "no go: gate_up 66.0 -> 63.0 us, layer 130.0 -> 128.0" in report.verdict(found)
    gate_up.tried = [timed(62.0, early)]
    assert " GO: gate_up 66.0 -> 58.0 us" in report.verdict(found)
    gate_up.tried = [timed(67.0, early)]
    found.arms["ours+pdl"] = 123.0
    assert " GO: " in report.verdict(found)
    # What computes other bits in each replay is too fast to be true.
    found.same["ours+pdl"] = False
    assert "nothing to decide" in report.verdict(found)
    assert "REPLAYS DIFFER" in "\n".join(report.lines(found))


CODE = """
import json, subprocess, sys
from pathlib import Path
import triton
from benchmarks.products.compiled import order_of
from benchmarks.products.plan import Plan
from benchmarks.products.product_call import launches_of
from benchmarks.products.shapes import LLAMA_8B
from vllm_graft.spec_decode.startup.compiler import compile_launch, pretend_gpu

pretend_gpu(("cuda", 90, 32))
tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
for number, values in enumerate(json.loads(sys.argv[2])):
    [launch] = launches_of(Plan(*values), LLAMA_8B.products[2], 32, 132)
    compiled = compile_launch(launch)
    file = Path(sys.argv[1]) / f"{number}.cubin"
    file.write_bytes(compiled.asm["cubin"])
    said = subprocess.run([str(tool), "-c", str(file)], capture_output=True, text=True, check=True)
    for code, machine in ((compiled.asm["ptx"], False), (said.stdout, True)):
        print(json.dumps(order_of(code, machine=machine)))
"""


@functools.cache
def compiler_is_missing() -> bool:
    import triton

    return not (Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas").exists()


def test_weights_are_loaded_before_the_wait(tmp_path: Path) -> None:
    """What stands before the wait, in PTX and in sm_90's code: weights alone, and no writes."""
    if compiler_is_missing():
        pytest.skip("Triton without NVIDIA's tools")
    deep = Plan(True, 128, 128, 5, 4, resident=1, ahead=2)
    flat = Plan(False, 64, 128, 3, 4, ahead=4)
    plans = [deep, flat, flat._replace(ahead=0), deep._replace(overlapped=False, ahead=0)]
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path), json.dumps(plans)],
        capture_output=True,
        text=True,
        timeout=600,
        env=compiling_environment(tmp_path),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    orders = [json.loads(line) for line in done.stdout.splitlines() if line[:1] in "[n"]
    # A thread copies 16 bytes at a time: these are four steps' weights and nothing else.
    copies = (deep.stages - 1) * deep.tile * deep.step * 2 // 16 // (32 * deep.warps)
    expected = [
        {"copies": copies, "prefetches": 2, "loads": 0, "writes": 0},
        {"copies": 0, "prefetches": 2, "loads": 0, "writes": 0},
        {"copies": 0, "prefetches": 0, "loads": 0, "writes": 0},
    ]
    for number, before in enumerate(expected):
        for ahead, after in orders[2 * number : 2 * number + 2]:
            assert ahead == before
            # Activations are loaded, and results written, after it.
            assert after["copies"] > 0
            assert after["writes"] > 0
    # Negative control: a kernel that does not overlap has no wait.
    assert orders[6:] == [None, None]


def compiling_environment(folder: Path) -> dict[str, str]:
    """An environment in which kernels are compiled, not interpreted."""
    import os

    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**kept, "TRITON_CACHE_DIR": str(folder / "cache")}


def test_order_of_code() -> None:
    code = "cp.async.cg.shared.global [a]\ngriddepcontrol.wait;\nld.global.b32\nst.global.b32"
    found = order_of(code)
    assert found is not None
    assert (found.before["copies"], found.after["copies"]) == (1, 0)
    assert (found.before["loads"], found.after["loads"], found.after["writes"]) == (0, 1, 1)
    assert order_of("ld.global.b32") is None
    with pytest.raises(ValueError, match="2 waits"):
        order_of(code + "griddepcontrol.wait")


def test_in_chain_is_relative_to_cublas() -> None:
    found = FoundProduct(LLAMA_8B.products[2], 70.0, 69.0, 4.0)
    assert found.in_chain(None) == 66.0
    assert found.in_chain(timed(62.0, FLAT)) == 58.0
    assert not found.wins(overlapped=False)
    found.tried = [timed(70.0, FLAT), replace(timed(1.0, FLAT), failure="no")]
    assert not found.wins(overlapped=False)
    found.tried.append(timed(68.0, FLAT))
    assert found.wins(overlapped=False)


def test_a_copy_reads_and_writes() -> None:
    assert copy_rate(FakeClock(), "cpu", 1 << 10) == pytest.approx(2 * (1 << 10) / 999e-6)


@pytest.mark.gpu
def test_small_products_on_a_gpu() -> None:
    for kind in smoke.PLANS:
        assert smoke.failures(kind, "cuda") == []
