"""The benchmark of attention without a GPU: shapes, inputs, the platform's arguments, tables.

Kernels of the platform don't run here. Functions with their signatures stand in for them, and
compute plainly what the arguments mean; so an argument that says something else shows.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from torch import Tensor

from benchmarks.attention import __main__ as command
from benchmarks.attention import platform_calls, problems, rows, table
from benchmarks.attention.shapes import SHAPES, KvLayer, LatentLayer, Layer, moved_bytes
from vllm_graft.spec_decode.kernels.attention.attention_plan import AttentionWorkspace
from vllm_graft.spec_decode.targets.dense.plain_attention import tree_attention_reference
from vllm_graft.spec_decode.targets.dense.two_pass import Point
from vllm_graft.spec_decode.targets.latent.plain_latent import latent_attention_reference
from vllm_graft.spec_decode.trees.batch import LatentBatch, TreeBatch

FULL = KvLayer("full", 4, 2, 16)
WINDOW = KvLayer("window 24", 4, 2, 16, window=24, sinks=True, alike=False)
LATENTS = LatentLayer("latents", 3, rank=32, rope=16)
TINY: list[Layer] = [FULL, WINDOW, LATENTS]
POINT = Point(2, 5, 83)


def batches(layer: Layer, point: Point = POINT, copies: int = 3) -> list[Any]:
    return problems.problems(layer, point, copies, "cpu", cold_bytes=1 << 18, cache_bytes=1 << 19)


def reference(batch: TreeBatch | LatentBatch) -> Tensor:
    out = torch.full_like(batch.query, float("nan"), memory_format=torch.contiguous_format)
    if isinstance(batch, LatentBatch):
        latent_attention_reference(batch, out)
    else:
        tree_attention_reference(batch, out)
    return out


def plain_chain(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """A chain's rows of one request ``[rows, heads, ...]`` over keys ``[length, kv_heads, ...]``.

    The rows are the last ones of the sequence.
    """
    group = query.shape[1] // keys.shape[1]
    keys, values = (each.float().repeat_interleave(group, 1) for each in (keys, values))
    logits = torch.einsum("rhd,nhd->hrn", query.float(), keys) * scale
    length, count = len(keys), len(query)
    behind = torch.arange(length - count, length)[:, None] - torch.arange(length)
    seen = (behind >= 0) & (behind < window) if window else behind >= 0
    logits = logits.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks.float()[:, None, None].expand(-1, count, 1)], -1)
    weights = logits.softmax(-1)[..., :length]
    return torch.einsum("hrn,nhd->rhd", weights, values)


def paged(cache: Tensor, table_row: Tensor, length: int) -> Tensor:
    """A request's entries of a cache ``[blocks, slots, ...]``."""
    return cache[table_row.long()].flatten(0, 1)[:length]


# --- shapes and inputs --------------------------------------------------------------------------


def test_models_have_their_published_shapes() -> None:
    assert set(SHAPES) == {"llama-8b", "gpt-oss", "gemma-3", "deepseek-v2-lite", "deepseek-v3"}
    # Bytes of a token's keys: 2 x heads x size x 2, and 576 numbers of 2 bytes.
    sizes = {name: layers[0].key_bytes for name, layers in SHAPES.items()}
    assert sizes == {
        "llama-8b": 4096,
        "gpt-oss": 2048,
        "gemma-3": 4096,
        "deepseek-v2-lite": 1152,
        "deepseek-v3": 1152,
    }
    assert [layer.window for layer in SHAPES["gpt-oss"] + SHAPES["gemma-3"]] == [0, 128, 0, 1024]
    every = [layer for layers in SHAPES.values() for layer in layers]
    assert [rows.has_two_passes(layer) for layer in every] == [not layer.window for layer in every]


@pytest.mark.parametrize("layer", TINY, ids=lambda each: each.name)
def test_bytes_are_those_of_the_keys_that_a_chain_sees(layer: Layer) -> None:
    [batch] = batches(layer, copies=1)
    chain = problems.chain_of(batch)
    first = POINT.context - POINT.rows
    seen = set()
    for row in range(POINT.rows):
        assert int(chain.row_masks[row]) == 2 ** (row + 1) - 1
        least = max(0, first + row - layer.window + 1) if layer.window else 0
        seen |= set(range(least, first + row + 1))
    numbers = {FULL: 2 * 2 * 16, WINDOW: 2 * 2 * 16, LATENTS: 48}[layer]
    heads = {FULL: 2 * 4 * 16, WINDOW: 2 * 4 * 16, LATENTS: 3 * (32 + 16 + 32)}[layer]
    expected = 2 * 2 * (len(seen) * numbers + POINT.rows * heads)
    assert moved_bytes(layer, POINT.num_reqs, POINT.rows, POINT.context) == expected


@pytest.mark.parametrize("layer", TINY, ids=lambda each: each.name)
def test_calls_of_a_graph_read_blocks_of_their_own(layer: Layer) -> None:
    found = batches(layer)
    null = len(found[0].latents if layer is LATENTS else found[0].kv_cache) - 1
    first = max(0, POINT.context - POINT.rows - layer.window + 1) if layer.window else 0
    before = first // layer.block_size
    read: set[int] = set()
    for batch in found:
        assert (batch.block_table[:, :before] == null).all()
        own = batch.block_table[:, before:].flatten().tolist()
        assert null not in own
        assert len(set(own)) == len(own)
        assert not read & set(own)
        read |= set(own)
    # Negative control: a cache that may not be so large has blocks that are shared.
    small = problems.problems(layer, POINT, 3, "cpu", cold_bytes=0, cache_bytes=1 << 12)
    assert len({int(each) for batch in small for each in batch.block_table.flatten()}) < len(read)
    with pytest.raises(ValueError, match="do not fit"):
        batches(layer, Point(1, 8, 7))


@pytest.mark.parametrize("layer", TINY, ids=lambda each: each.name)
def test_trees_become_chains(layer: Layer) -> None:
    """A plain causal computation agrees on chains, and on the trees it does not."""
    rows, context = 12, 31
    [batch] = batches(layer, Point(2, rows, context), copies=1)
    found, trees = reference(problems.chain_of(batch)), reference(batch)
    for request in range(2):
        own = slice(request * rows, (request + 1) * rows)
        expected = expected_chain(batch, request, rows, context)
        torch.testing.assert_close(found[own].float(), expected, rtol=0, atol=0.02)
        assert (trees[own].float() - expected).abs().max() > 0.2


def expected_chain(
    batch: TreeBatch | LatentBatch, request: int, count: int, context: int = POINT.context
) -> Tensor:
    end = (request + 1) * batch.max_rows
    own, row = slice(end - count, end), batch.block_table[request]
    if isinstance(batch, LatentBatch):
        keys = paged(batch.latents, row, context)[:, None]
        query = torch.cat([batch.query, batch.query_rope], -1)[own]
        return plain_chain(query, keys, keys[..., : batch.query.shape[2]], batch.scale)
    keys, values = paged(batch.kv_cache.transpose(1, 2), row, context).chunk(2, -1)
    return plain_chain(batch.query[own], keys, values, batch.scale, batch.window, batch.sinks)


# --- the platform's kernels ---------------------------------------------------------------------


def plain_flash(given: dict[str, Any]) -> Tensor:
    """What the arguments of ``flash_attn_varlen_func`` mean."""
    assert given["causal"]
    assert given["fa_version"] == 3
    starts = given["cu_seqlens_q"].tolist()
    window = given["window_size"] or [-1, -1]
    assert window[1] in (-1, 0)
    found = []
    for request, length in enumerate(given["seqused_k"].tolist()):
        assert length <= given["max_seqlen_k"]
        own = slice(starts[request], starts[request + 1])
        assert own.stop - own.start <= given["max_seqlen_q"]
        query = given["q"][own]
        keys, values = (paged(given[n], given["block_table"][request], length) for n in "kv")
        if given["q_v"] is not None:
            query, keys = torch.cat([given["q_v"][own], query], -1), torch.cat([values, keys], -1)
        found.append(
            plain_chain(query, keys, values, given["softmax_scale"], window[0] + 1, given["s_aux"])
        )
    out = torch.cat(found).to(given["q"].dtype)
    if given["out"] is not None:
        given["out"].copy_(out)
    return out


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stand-ins with the signatures of FlashAttention 3; what its plans were made with."""
    folder = Path(vllm.__file__).parent / "vllm_flash_attn"
    package = types.ModuleType("vllm.vllm_flash_attn")
    # Without its kernels the package refuses to be imported; its interface does not.
    package.__path__ = [str(folder)]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    interface = importlib.import_module(f"{package.__name__}.flash_attn_interface")
    monkeypatch.setitem(sys.modules, interface.__name__, interface)

    plans: list[dict[str, Any]] = []

    def bound(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
        arguments = inspect.signature(function).bind(**given)
        arguments.apply_defaults()
        return arguments.arguments

    attention, planning = interface.flash_attn_varlen_func, interface.get_scheduler_metadata

    def attend(**given: Any) -> Tensor:
        return plain_flash(bound(attention, given))

    def plan(**given: Any) -> str:
        plans.append(bound(planning, given))
        return "a plan"

    monkeypatch.setattr(interface, "flash_attn_varlen_func", attend)
    monkeypatch.setattr(interface, "get_scheduler_metadata", plan)
    return plans


@pytest.mark.parametrize("count", [POINT.rows, 1])
@pytest.mark.parametrize("layer", TINY, ids=lambda each: each.name)
def test_the_platform_is_given_the_chain(
    layer: Layer, count: int, platform: list[dict[str, Any]]
) -> None:
    given = batches(layer)
    first, *others = platform_calls.yardsticks(layer)
    for yardstick in [first, *(each for each in others if "FLASH_ATTN" in each.name)]:
        calls = yardstick.make(given, count, 96)
        assert len(calls) == len(given)
        for batch, call in zip(given, calls):
            expected = [expected_chain(batch, request, count) for request in range(2)]
            found = call().float()
            torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=0.02)
    # VLLM plans once where all layers have the same window, else each call does.
    assert len(platform) == (0 if layer is WINDOW else 1)
    assert all(each["num_splits"] == 32 and each["max_seqlen_q"] == count for each in platform)


@pytest.mark.parametrize("count", [POINT.rows, 1])
def test_triton_is_given_the_chain(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own kernel, in the interpreter."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "num_compute_units", lambda *_: 8, raising=False)
    given = batches(LATENTS)
    for batch, call in zip(given, platform_calls.triton_latents(given, count, 96)):
        expected = [expected_chain(batch, request, count) for request in range(2)]
        torch.testing.assert_close(call().float(), torch.cat(expected), rtol=0, atol=0.02)


def test_layers_have_the_platforms_kernels_in_its_order() -> None:
    names = [[each.name for each in platform_calls.yardsticks(layer)] for layer in TINY]
    assert names[0] == names[1] == ["FLASH_ATTN", "FLASH_ATTN, its own splits"]
    assert names[2] == ["FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA"]


# --- lines --------------------------------------------------------------------------------------


def bench(times: list[float], monkeypatch: pytest.MonkeyPatch) -> rows.Bench:
    """A bench whose timer runs a call once and then says the next of `times`."""
    following = iter(times)

    def timer(call: Callable[[], object]) -> float:
        call()
        return next(following)

    monkeypatch.setattr(rows, "CALLS", 2)
    small = problems.problems
    monkeypatch.setattr(
        rows, "problems", lambda *given: small(*given, cold_bytes=1 << 18, cache_bytes=1 << 19)
    )
    space = AttentionWorkspace.allocate(2, 5, 4, 32, 4, "cpu")
    return rows.Bench(5, space, 96, 1e9, timer, "cpu")


def test_a_line_compares_both(
    platform: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = bench([6.0, 5.0, 2.0, 4.0, 1.0], monkeypatch).measure("tiny", WINDOW, 2, 83)
    assert row.failures == {}
    assert (row.ours, row.chosen, row.taken) == (6.0, "triton", "FLASH_ATTN")
    assert row.platform == {"FLASH_ATTN": 5.0, "FLASH_ATTN, its own splits": 4.0}
    assert row.one_row == {"FLASH_ATTN": 2.0, "FLASH_ATTN, its own splits": 1.0}
    assert (row.ratio, row.ratio_of_best) == (1.2, 1.5)
    assert row.share == pytest.approx(row.bytes / 1e9 * 1e6 / 6)
    assert not row.differs
    assert set(row.differences) == set(row.platform)


def test_a_kernel_that_computes_something_else_shows(
    platform: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "chain_of", lambda batch: batch)
    row = bench([1.0] * 5, monkeypatch).measure("tiny", WINDOW, 2, 83)
    assert row.differs
    assert command.report([row], None) == 1
    nan = replace(row, differences={"FLASH_ATTN": float("nan")})
    assert nan.differs


def test_what_does_not_run_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here none of the platform's kernels runs."""
    row = bench([7.0], monkeypatch).measure("tiny", LATENTS, 2, 83)
    assert row.ours == 7.0
    assert (row.platform, row.ratio, row.taken) == ({}, None, "")
    assert list(row.failures) == ["FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA"]
    lines = table.failures([row, row])
    assert len(lines) == 3
    assert "tiny, latents: FLASHMLA did not run at 2x83, 2x83: RuntimeError: " in lines[1]
    assert table.verdicts([row]) == ["tiny, latents: 1 of 1 sizes have no ratio, see the errors"]
    # A kernel that fails for one row alone does not cost the chain's time.
    assert "-" in table.cells(row)


def line(layer: str, context: int, ours: float, theirs: float, batch: int = 1) -> rows.Row:
    row = rows.Row("gemma-3", layer, batch, context, {"triton": ours}, "triton", {"FA": theirs})
    return row


def test_verdicts_name_the_worst_and_compare_windows() -> None:
    found = [
        line("full", 2048, 11.0, 10.0),
        line("full", 8192, 30.0, 20.0, batch=4),
        line("window 1024", 1024, 20.0, 10.0),
        line("window 1024", 8192, 12.0, 10.0),
        line("window 1024", 32768, 22.0, 20.0),
    ]
    assert table.verdicts(found) == [
        "gemma-3, full: at worst 1.50 of FA, at batch 4 and 8192 keys (aim 1.25)",
        # The first size has less context than the aim is for.
        "gemma-3, window 1024: at worst 1.20 of FA, at batch 1 and 8192 keys (aim 1.25)",
        "gemma-3, window 1024, batch 1: 22.0 us at 32768 keys, 20.0 at 1024: 1.10 (aim 1)",
    ]
    assert table.windows(found[:2]) == []
    lines = table.table(found).splitlines()
    assert len(lines) == 7
    assert all(each.count("|") == len(table.HEADS) + 1 for each in lines)


def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert command.main(["--shape", "all"]) == 2
    assert "needs a GPU" in capsys.readouterr().err
