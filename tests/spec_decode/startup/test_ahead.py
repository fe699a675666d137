"""Kernels are compiled ahead by another process, tensors without memory stand in, clocks tell."""

import contextlib
import gc
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.compiling.compiling_process import printed_by
from tests.support.compiling.compiling_worker import rank_launch
from vllm_graft.base.locks import locked
from vllm_graft.spec_decode.kernels.attention import e4m3
from vllm_graft.spec_decode.kernels.attention.attention_plan import AttentionWorkspace
from vllm_graft.spec_decode.kernels.kernel_launch import Launch, listing
from vllm_graft.spec_decode.startup import ahead as ahead_module
from vllm_graft.spec_decode.startup.ahead import (
    compile_ahead,
    compiling_environment,
    fingerprint,
    keep_cache,
)
from vllm_graft.spec_decode.startup.clock import PARTS, StartClock
from vllm_graft.spec_decode.startup.rehearsal import begin
from vllm_graft.spec_decode.startup.stand_ins import Attention, LayerShape, empty
from vllm_graft.spec_decode.targets.dense.layer import DraftTreeMetadata
from vllm_graft.spec_decode.verification.context import VerifyMode

HOPPER = ("cuda", 90, 32)

WORKER = Path(__file__).parents[2] / "support" / "compiling" / "compiling_worker.py"

REAL_CALL = """
import torch
from triton import knobs
from vllm_graft.spec_decode.kernels.candidates import _rank_kernel
from vllm_graft.spec_decode.startup.compiler import pretend_gpu

pretend_gpu(("cuda", 90, 32))
knobs.compilation.listener = lambda *, cache_hit, **others: print(cache_hit)
for width in (100, 101):
    _rank_kernel.fn.run(
        torch.zeros(8), torch.zeros(8, dtype=torch.int32), grid=(1,), warmup=True,
        WIDTH=width, CANDIDATES=width, NODES=7, NODES_PAD=8, BLOCK=32, OTHERS=32,
    )
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Triton's cache, empty."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    return folder


def eventually(holds: Callable[[], bool], seconds: float = 30) -> bool:
    """Whether something becomes true within some seconds."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


def lives(process: int) -> bool:
    """Whether there is such a process, or one of the session that it leads."""
    try:
        os.killpg(process, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def many_files_open() -> Iterator[None]:
    """Servers have more descriptors than ``select`` knows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this process may not open as many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while stack.enter_context(open(os.devnull)).fileno() < 1024:
            pass
        yield


def test_what_is_compiled_ahead_is_found_by_a_launch(cache: Path) -> None:
    with many_files_open():
        ahead = compile_ahead([rank_launch(100), rank_launch(100)], HOPPER, 1)
        ahead.finish()
    assert (ahead.foretold, ahead.compiled, ahead.failed, ahead.why) == (1, 1, {}, "")
    assert 0 < ahead.waited <= ahead.seconds
    assert list(cache.rglob("*.cubin"))
    printed = printed_by("-c", REAL_CALL).split()
    # Control: nobody has foretold the second call.
    assert printed == ["True", "False"]
    again = compile_ahead([rank_launch(100)], HOPPER, 1)
    assert again._running is None
    assert again.why == "an earlier start has compiled them"
    # Another list, or another GPU, is another matter.
    names = {
        fingerprint(launches, target)
        for launches in ([rank_launch(100)], [rank_launch(102)])
        for target in (HOPPER, ("cuda", 80, 32))
    }
    assert len(names) == 4


def test_the_order_of_launches_is_the_same_list() -> None:
    """Sets of launches have another order in each process, and a later start is another process."""
    launches = [rank_launch(width) for width in (100, 101, 102)]
    assert fingerprint(launches, HOPPER) == fingerprint(launches[::-1], HOPPER)
    assert fingerprint(launches, HOPPER) != fingerprint(launches[1:], HOPPER)


def test_a_kernel_that_does_not_compile_costs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    wrong = rank_launch(103, block=24)
    ahead = compile_ahead([rank_launch(101), wrong, rank_launch(102)], HOPPER, 2)
    with caplog.at_level("WARNING", "vllm.graft"):
        ahead.finish()
        ahead.finish()
    assert (ahead.foretold, ahead.compiled) == (3, 2)
    assert "power of 2" in ahead.failed["_rank_kernel"]
    [told] = caplog.messages
    assert "compiled 2 of 3 kernels ahead; _rank_kernel" in told
    # Nothing says that all is compiled, so that the next start tries again.
    again = compile_ahead([rank_launch(101), wrong, rank_launch(102)], HOPPER, 2)
    assert again._running is not None


def test_the_process_ends_with_a_killed_worker() -> None:
    with subprocess.Popen(
        [sys.executable, "-P", str(WORKER)], env=compiling_environment(), stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdout is not None
        compiler = int(worker.stdout.readline())
        children = Path(f"/proc/{compiler}/task/{compiler}/children")
        assert eventually(lambda: bool(children.read_text()), 120), "it never compiled"
        worker.send_signal(signal.SIGKILL)
    assert eventually(lambda: not lives(compiler))


def test_the_process_ends_when_nobody_waits_for_it() -> None:
    ahead = compile_ahead([rank_launch(width) for width in range(100, 200)], HOPPER, 2)
    assert ahead._running is not None
    compiler = ahead._running._process.pid
    assert lives(compiler)
    del ahead
    gc.collect()
    assert eventually(lambda: not lives(compiler))


@pytest.mark.parametrize(
    ("module", "words"),
    [("hanging_compiler", "the process: nothing came of it"), ("no_such_module", "No module")],
)
def test_a_process_that_fails_costs_the_start_nothing(
    module: str, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(str(WORKER.parent))
    monkeypatch.setattr(ahead_module, "_COMPILER", module)
    monkeypatch.setattr(ahead_module, "PATIENCE_SECONDS", 0.5)
    ahead = compile_ahead([rank_launch(100)], HOPPER, 1)
    assert ahead._running is not None
    compiler = ahead._running._process.pid
    with caplog.at_level("WARNING", "vllm.graft"):
        ahead.finish()
    assert ahead.compiled == 0
    assert not lives(compiler)
    [told] = caplog.messages
    assert words in told
    assert "compiled where it is first used" in told


def test_one_worker_of_a_host_compiles(cache: Path) -> None:
    cache.mkdir()
    with locked(cache / "vllm-graft.lock"):
        ahead = compile_ahead([rank_launch(100)], HOPPER, 1)
    assert ahead.why == "another worker compiles them"
    ahead.finish()
    assert ahead.compiled == 0


def test_a_cache_that_can_t_be_written_is_said(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file")
    with caplog.at_level("WARNING", "vllm.graft"):
        ahead = compile_ahead([rank_launch(100)], HOPPER, 1)
    assert "FileExistsError" in ahead.why
    assert "compiles no kernels ahead" in caplog.text


def test_the_cache_stays_the_one_that_triton_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert keep_cache() == tmp_path / "cache"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    from triton import knobs

    monkeypatch.setattr(knobs.cache, "home_dir", str(tmp_path))
    assert keep_cache() == tmp_path / ".triton" / "cache"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / ".triton" / "cache")


@pytest.mark.parametrize(
    ("processes", "why"),
    [
        ("0", "VLLM_GRAFT_COMPILE_PROCESSES is 0"),
        ("", "kernels of device cpu are not compiled ahead"),
    ],
)
def test_nothing_begins_without_a_gpu_or_when_it_is_off(
    processes: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_GRAFT_COMPILE_PROCESSES", processes)
    drafter: Any = SimpleNamespace(device=torch.device("cpu"))
    assert begin(drafter).report() == {
        "foretold": 0,
        "compiled": 0,
        "failed": {},
        "seconds": 0.0,
        "waited": 0.0,
        "why": why,
    }


@pytest.fixture
def knobs() -> Iterator[Any]:
    """Triton's knobs, whose listener comes back."""
    from triton import knobs

    before = knobs.compilation.listener
    yield knobs
    knobs.compilation.listener = before


def told(module: str, seconds: float, *, cache_hit: bool) -> dict[str, Any]:
    """What Triton tells its listener of a kernel."""
    times = SimpleNamespace(total=seconds * 1e6)
    source = SimpleNamespace(fn=SimpleNamespace(module=module))
    rest = {"metadata": {}, "metadata_group": {}}
    return {"src": source, "times": times, "cache_hit": cache_hit, **rest}


def test_compiling_counts_towards_no_other_part() -> None:
    clock = StartClock()
    with clock.part("attention"):
        time.sleep(0.05)
        clock.count(**told("vllm_graft.spec_decode.kernels.candidates", 20.0, cache_hit=False))
    assert clock.seconds["compile"] == 20
    assert clock.seconds["attention"] == 0
    # Control: without it, the part takes what it takes.
    with clock.part("attention"):
        time.sleep(0.05)
    assert clock.seconds["attention"] >= 0.05
    assert tuple(clock.seconds) == PARTS


def test_a_part_that_fails_is_timed_too() -> None:
    clock = StartClock()
    with pytest.raises(RuntimeError), clock.part("wait"):
        raise RuntimeError
    assert clock.seconds["wait"] > 0


def test_our_kernels_are_told_from_others(knobs: Any) -> None:
    before: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **others: before.append(cache_hit)
    clock = StartClock()
    clock.listen()
    for module in ("vllm_graft.spec_decode.kernels.verify", "vllm.v1.sample.ops", "__main__"):
        for cache_hit in (True, False, False):
            knobs.compilation.listener(**told(module, 1.0, cache_hit=cache_hit))
    assert (clock.compiled, clock.loaded) == (2, 1)
    assert clock.seconds["compile"] == 9
    # Who listened before hears the same.
    assert before == [True, False, False] * 3


def test_the_log_says_what_took_how_long(caplog: pytest.LogCaptureFixture) -> None:
    clock = StartClock()
    clock.seconds["draft_graphs"] = 3.26
    clock.count(**told("vllm_graft.x", 1.0, cache_hit=True))
    with caplog.at_level("INFO", "vllm.graft"):
        clock.log()
    [line] = caplog.messages
    assert "draft_graphs 3.3" in line
    assert "compile 1.0" in line
    assert "0 of its kernels were compiled in this process, 1 found in Triton's cache" in line


LAYER = LayerShape(
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    dtype=torch.bfloat16,
    fp8=True,
    block_size=16,
    max_len=512,
)


def context(capability: tuple[int, int]) -> Any:
    space = AttentionWorkspace.allocate(2, 8, 4, 64, 8, "meta")
    return SimpleNamespace(
        mode=VerifyMode.ALL,
        shape=SimpleNamespace(num_nodes=7, topk=4),
        rows=SimpleNamespace(
            row_masks=empty(16, dtype=torch.int64),
            row_depths=empty(16),
            num_rows=empty(2),
            prefix_lens=empty(2),
        ),
        draft_window=0,
        workspace=replace(space, multiprocessors=132, capability=capability),
    )


def split_launches(layer: LayerShape, capability: tuple[int, int]) -> list[dict[str, Any]]:
    """Arguments of the kernel of splits, for a tree and for a level of a draft."""
    found: list[Launch] = []
    shared = context(capability)
    metadata = DraftTreeMetadata(
        level=1,
        topk=4,
        num_reqs=2,
        prefix_lens=empty(2),
        block_table=layer.block_table(2),
        ancestors=empty(2, 4, 3),
        scratch=empty(2, 12, 2, 128).to(layer.dtype),
        max_seq_len=512,
    )
    with listing(found.append):
        Attention(layer, shared, is_draft=False).verify(2, 8, 512)
        Attention(layer, shared, is_draft=True).draft(metadata)
    found = [each for each in found if each.name == "split_kernel"]
    assert len(found) == 2
    return [dict(each.arguments) for each in found]


def test_queries_are_e4m3_where_kernels_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in split_launches(LAYER, (9, 0)):
        assert given["query"].dtype == given["kv_cache"].dtype == "float8_e4m3fn"
        assert given["q_scale"].dtype == "float32"
        assert given["FP8"] == e4m3.PRODUCTS
        assert given["out"].dtype == "bfloat16"
    # Controls: a device that does not know them, a cache in 16 bits, and as it is without.
    for given in split_launches(LAYER, (8, 0)):
        assert (given["query"].dtype, given["kv_cache"].dtype) == ("bfloat16", "uint8")
        assert given["q_scale"] is None
    for given in split_launches(replace(LAYER, fp8=False), (9, 0)):
        assert given["query"].dtype == given["kv_cache"].dtype == "bfloat16"
    monkeypatch.setattr(e4m3, "MEASURED", None)
    for given in split_launches(LAYER, (9, 0)):
        assert given["query"].dtype == "bfloat16"
