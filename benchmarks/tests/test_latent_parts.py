"""The benchmark of the parts of attention over latents, with stand-ins for what needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.attention import latent_parts, own_calls, problems
from benchmarks.attention.latent_parts import Part, loaded_bytes, part_bytes
from benchmarks.attention.platform_calls import Yardstick
from benchmarks.attention.rows import TOLERANCE
from benchmarks.attention.shapes import SHAPES, LatentLayer
from vllm_graft.spec_decode.kernels.attention.workspace import AttentionWorkspace
from vllm_graft.spec_decode.targets.dense.choice import Point
from vllm_graft.spec_decode.targets.dense.two_pass import Passes
from vllm_graft.spec_decode.targets.latent.own_latents import OwnTile, attend_own_latents
from vllm_graft.spec_decode.targets.latent.plain_latent import prefix_latents_reference

LAYER = LatentLayer("latents", 3, rank=32, rope=16)
POINT = Point(2, 5, 83)


def first_pass(batch: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = prefix_latents_reference(batch, multiprocessors=options["multiprocessors"])
    return out.to(batch.query.dtype), lse


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Part]]:
    """The lines of a small size; the n-th call that is timed takes n microseconds."""
    passes = Passes(lambda batch, **_: batch.prefix_lens, first_pass, attend_own_latents)
    small, count = problems.problems, iter(range(1, 100))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(latent_parts, "LATENT_PASSES", passes)
    monkeypatch.setattr(own_calls, "LATENT_PASSES", passes)
    monkeypatch.setattr(latent_parts, "CALLS", 2)
    monkeypatch.setattr(
        latent_parts,
        "problems",
        lambda *given: small(*given, cold_bytes=1 << 18, cache_bytes=1 << 19),
    )
    platform = Yardstick("NONE", lambda batches, rows, longest: [lambda: torch.empty(0)])
    monkeypatch.setattr(latent_parts, "yardsticks", lambda layer: [platform])

    def timer(call: Callable[[], object]) -> float:
        call()
        call()
        return float(next(count))

    def run(*tiles: OwnTile) -> list[Part]:
        space = AttentionWorkspace.allocate(2, 5, 3, 32, 4, "cpu")
        return latent_parts.parts(
            "tiny", LAYER, POINT, space, timer, longest=96, candidates=tiles, device="cpu"
        )

    return run


def test_parts_are_those_of_a_layer(timed: Callable[..., list[Part]]) -> None:
    tiles = (OwnTile(16, 16, 4, 1), OwnTile(32, 32, 4, 2))
    lines = timed(*tiles)
    names = ["zeros", "first pass", "second pass", "both", "platform: NONE"]
    assert [each.part for each in lines] == [*names, *map(latent_parts.label, tiles)]
    assert [each.time for each in lines] == [1, 2, 3, 4, 5, 6, 7]
    assert all(each.error == "" and each.difference < 0.02 for each in lines)
    cells = lines[-1].cells(1e9)
    assert len(cells) == len(latent_parts.HEADS)
    assert cells[4:6] == ["7.0", f"{2.5 + lines[-1].bytes / 1e3:.1f}"]


def test_other_results_show(
    timed: Callable[..., list[Part]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that compute something else, and some that do not run."""
    attend, wrong, broken = attend_own_latents, OwnTile(16, 16, 4, 1), OwnTile(16, 16, 4, 9)

    def altered(batch: Any, prefix: Any, lse: Any, out: Any, *, tile: Any = None) -> None:
        if tile == broken:
            raise RuntimeError("out of resource")
        attend(batch, prefix, lse - 3 if tile == wrong else lse, out)

    monkeypatch.setattr(latent_parts, "attend_own_latents", altered)
    *_, first, second = timed(wrong, broken)
    assert first.difference > TOLERANCE
    assert second.error == "RuntimeError: out of resource"
    assert second.cells(1e9)[4] == second.error


def test_bytes_are_those_of_tensors() -> None:
    batch: Any
    [batch] = problems.problems(LAYER, POINT, 1, "cpu", cold_bytes=1 << 18, cache_bytes=1 << 19)
    out, lse = first_pass(batch, multiprocessors=1)
    found, slot = part_bytes(LAYER, POINT), 48 * 2
    queries = batch.query.nbytes + batch.query_rope.nbytes
    assert found["zeros"] == out.nbytes
    assert found["first pass"] == queries + 2 * 78 * slot + out.nbytes + lse.nbytes
    assert found["second pass"] == queries + 2 * 5 * slot + 2 * out.nbytes + lse.nbytes
    assert found["both"] == found["first pass"] + found["second pass"]
    assert found["platform"] == queries + 2 * 83 * slot + out.nbytes
    # A program for all rows of a request loads its latents once, and its values once more.
    once = loaded_bytes(LAYER, POINT, OwnTile(16, 16, 4, 1))
    assert once == found["second pass"] + 2 * 5 * 32 * 2
    lite = SHAPES["deepseek-v2-lite"][0]
    assert isinstance(lite, LatentLayer)
    large, small = (loaded_bytes(lite, Point(4, 32, 2048), OwnTile(m, 64, 4, 3)) for m in (64, 16))
    assert small - large == 4 * (32 - 8) * 32 * (2 * 512 + 64) * 2


def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert latent_parts.main(["--batch", "1"]) == 2
    assert "needs a GPU" in capsys.readouterr().err
