"""The small kernels between the products of a layer, which can start while others still run.

A kernel that is ``OVERLAPPED`` lets its successor start at once, and waits for its predecessor
before it reads or writes what another kernel touches. As each kernel waits, what a kernel finds
after its wait is what all kernels before it have written, not only the last.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.listed_launch import Kernel

EPSILON = 1e-5


@Kernel
@triton.jit
def add_norm(
    delta, source, residual, gain, out, EPS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, HAS_DELTA: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """A row: ``residual = source + delta``, and ``out`` is its RMS norm times the gain."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    exists = place < SIZE
    factor = tl.load(gain + place, mask=exists, other=0.0).to(tl.float32)
    if OVERLAPPED:
        tl.extra.cuda.gdc_wait()
    value = tl.load(source + row * SIZE + place, mask=exists, other=0.0).to(tl.float32)
    if HAS_DELTA:
        value += tl.load(delta + row * SIZE + place, mask=exists, other=0.0).to(tl.float32)
    tl.store(residual + row * SIZE + place, value, mask=exists)
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + EPS)
    tl.store(out + row * SIZE + place, value * scale * factor, mask=exists)


@Kernel
@triton.jit
def mix(
    qkv, out, QUERY: tl.constexpr, KEY: tl.constexpr, HEAD: tl.constexpr, OVERLAPPED: tl.constexpr
):
    """Stands for attention: a row and head, ``q + (k + v) / 4`` of its KV head."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, HEAD)
    base = qkv + row * (QUERY + 2 * KEY)
    kv_head = head // (QUERY // KEY)
    query = tl.load(base + head * HEAD + place).to(tl.float32)
    key = tl.load(base + QUERY + kv_head * HEAD + place).to(tl.float32)
    value = tl.load(base + QUERY + KEY + kv_head * HEAD + place).to(tl.float32)
    tl.store(out + row * QUERY + head * HEAD + place, query + 0.25 * (key + value))


@Kernel
@triton.jit
def silu_mul(gate_up, out, INNER: tl.constexpr, BLOCK: tl.constexpr, OVERLAPPED: tl.constexpr):
    """A piece of a row: ``silu(gate) * up``."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = place < INNER
    base = gate_up + row * 2 * INNER + place
    gate = tl.load(base, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(base + INNER, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + row * INNER + place, gate * tl.sigmoid(gate) * up, mask=exists)


def early(overlapped: bool) -> dict[str, bool]:
    """Options of a launch that may begin before the kernel before has ended."""
    return {"launch_pdl": True} if overlapped else {}


def launch_add_norm(
    delta: torch.Tensor | None,
    source: torch.Tensor,
    residual: torch.Tensor,
    gain: torch.Tensor,
    out: torch.Tensor,
    *,
    overlapped: bool,
) -> None:
    """Launch `add_norm` over all rows of ``[rows, size]``; without `delta` nothing is added."""
    rows, size = source.shape
    add_norm[(rows,)](
        source if delta is None else delta, source, residual, gain, out,
        EPS=EPSILON, SIZE=size, BLOCK=triton.next_power_of_2(size), HAS_DELTA=delta is not None,
        OVERLAPPED=overlapped, num_warps=8, **early(overlapped),
    )  # fmt: skip


def launch_mix(qkv: torch.Tensor, out: torch.Tensor, head: int, *, overlapped: bool) -> None:
    """Launch `mix` over rows ``[rows, query + 2 key]`` of heads of `head` numbers."""
    rows, query = out.shape
    key = (qkv.shape[1] - query) // 2
    mix[(rows, query // head)](
        qkv, out, QUERY=query, KEY=key, HEAD=head, OVERLAPPED=overlapped,
        num_warps=1, **early(overlapped),
    )  # fmt: skip


def launch_silu_mul(gate_up: torch.Tensor, out: torch.Tensor, *, overlapped: bool) -> None:
    """Launch `silu_mul` over rows ``[rows, 2 inner]``."""
    rows, inner = out.shape
    block = min(1024, triton.next_power_of_2(inner))
    silu_mul[(rows, triton.cdiv(inner, block))](
        gate_up, out, INNER=inner, BLOCK=block, OVERLAPPED=overlapped,
        num_warps=4, **early(overlapped),
    )  # fmt: skip
