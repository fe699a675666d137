"""Each number of an e4m3 cache becomes itself, in every dtype that attention computes in."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.attention import e4m3
from vllm_graft.spec_decode.kernels.attention.e4m3 import (
    HALVES,
    PACKED,
    PLAIN,
    PRODUCTS,
    Native,
    conversion,
    load_rows,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]

NAN = [0x7F, 0xFF]
"""Bytes that are no numbers. A cache holds none, as vLLM saturates what it writes."""


@triton.jit
def _convert(cache, out, FP8: tl.constexpr):
    place = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    rows = load_rows(cache + place, place < 256, out.dtype.element_ty, FP8)
    tl.store(out + place, rows)


def converted(dtype: torch.dtype, form: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel and PyTorch make of all bytes that are numbers."""
    cache = torch.arange(256, dtype=torch.uint8, device=device)
    if form == HALVES:
        cache = cache.view(torch.float8_e4m3fn)
    out = torch.zeros(256, dtype=dtype, device=device)
    _convert[(1,)](cache, out, FP8=form)
    expected = cache.view(torch.float8_e4m3fn).to(dtype)
    numbers = torch.ones(256, dtype=torch.bool)
    numbers[NAN] = False
    return out.cpu()[numbers], expected.cpu()[numbers]


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_numbers(dtype: torch.dtype) -> None:
    found, expected = converted(dtype, PLAIN, "cpu")
    assert expected.isfinite().all()
    # Bit for bit, the sign of zero as well.
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_all_numbers_in_fp16() -> None:
    found, expected = converted(torch.float16, HALVES, "cpu")
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="the device has no instructions for e4m3",
)
def test_a_device_converts_all_numbers_to_fp16() -> None:
    found, expected = converted(torch.float16, HALVES, "cuda")
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("form", [PLAIN, PACKED])
def test_all_numbers_on_a_device(form: int, dtype: torch.dtype) -> None:
    found, expected = converted(dtype, form, "cuda")
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_numbers_are_packed_where_there_are_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On NVIDIA GPUs, in 16 bits; a tensor without memory stands for one there."""
    cache = {device: torch.empty(4, dtype=torch.uint8, device=device) for device in ("cpu", "meta")}
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert conversion(cache["meta"], torch.bfloat16) == PACKED
    assert conversion(cache["meta"].view(torch.float8_e4m3fn), torch.float16) == PACKED
    assert (
        conversion(cache["meta"], torch.float32)
        == conversion(cache["cpu"], torch.bfloat16)
        == PLAIN
    )
    assert conversion(cache["cpu"].to(torch.bfloat16), torch.bfloat16) == 0
    monkeypatch.setattr(torch.version, "cuda", None)
    assert conversion(cache["meta"], torch.bfloat16) == PLAIN


def test_beside_an_e4m3_query_nothing_is_converted_by_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = torch.empty(4, dtype=torch.uint8, device="meta")
    for query in (torch.uint8, torch.float8_e4m3fn):
        monkeypatch.setattr(e4m3, "NATIVE", None)
        assert conversion(cache, query) == HALVES
        monkeypatch.setattr(e4m3, "NATIVE", Native(PRODUCTS))
        assert conversion(cache, query) == PRODUCTS
