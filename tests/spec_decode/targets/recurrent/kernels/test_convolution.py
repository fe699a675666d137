"""Convolutions over trees equal a plain loop, and on a chain vLLM's own kernel."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from tests.support.references.recurrence_reference import tree_conv_reference
from tests.support.samples.recurrent_samples import DEVICE, random, rows_of, stock_chain_conv
from vllm_graft.spec_decode.targets.recurrent.kernels.convolution import tree_conv
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_rows import RecurrentRows

DIM = 24


def problem(
    rows: RecurrentRows, width: int = 4, *, dim_first: bool = False, bias: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    blocks, slots = int(rows.columns.max()) + 1, width - 2 + rows.columns.shape[1]
    shape = (blocks, DIM, slots) if dim_first else (blocks, slots, DIM)
    windows = random(*shape, seed=1)
    windows = windows if dim_first else windows.transpose(1, 2)
    # Queries, keys and values are a part of a wider projection.
    inputs = random(len(rows.parents) + 2, DIM + 8, seed=2)[:, :DIM]
    return inputs, windows, random(DIM, width, seed=3), random(DIM, seed=4) if bias else None


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("kind", ["random", "chain", "star"])
@pytest.mark.parametrize("sizes", [[1], [9, 1, 32, 4]])
def test_equals_a_plain_loop(kind: str, sizes: list[int], width: int) -> None:
    rows = rows_of(sizes, kind, padding=1)
    # A window begins where the last accepted row left it, and holds no more than a step's rows.
    inputs, windows, weights, bias = problem(rows, width)
    mine = windows.clone()
    found = tree_conv(inputs, mine, weights, bias, rows, silu=True)
    cpu = copy.copy(rows)
    cpu = replace(cpu, **{k: v.cpu() for k, v in vars(rows).items() if k != "num_reqs"})
    theirs = windows.cpu().clone()
    expected = tree_conv_reference(
        inputs.cpu(), theirs, weights.cpu(), None if bias is None else bias.cpu(), cpu, silu=True
    )
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(mine.cpu(), theirs)


@pytest.mark.parametrize("dim_first", [False, True])
def test_a_chain_has_the_bits_of_the_platform_s_kernel(dim_first: bool) -> None:
    rows = rows_of([7, 1, 4], "chain", padding=1)
    inputs, windows, weights, bias = problem(rows, dim_first=dim_first)
    mine, theirs = windows.clone(), windows.clone()
    found = tree_conv(inputs, mine, weights, bias, rows, silu=True)
    expected = stock_chain_conv(inputs, theirs, weights, bias, rows)
    used = len(rows.parents)
    assert torch.equal(found[:used], expected[:used])
    assert torch.equal(mine, theirs)
    assert not found[used:].any()


def test_without_a_bias_and_without_silu() -> None:
    rows = rows_of([5], "random")
    inputs, windows, weights, _ = problem(rows)
    zeros = torch.zeros(DIM, device=DEVICE)
    found = tree_conv(inputs, windows.clone(), weights, None, rows, silu=False)
    assert torch.equal(found, tree_conv(inputs, windows.clone(), weights, zeros, rows, silu=False))
    silu = tree_conv(inputs, windows.clone(), weights, None, rows, silu=True)
    torch.testing.assert_close(silu, torch.nn.functional.silu(found))


def test_rows_before_a_row_are_no_ancestors() -> None:
    """Negative control: as a chain the rows of a tree come out otherwise."""
    rows = rows_of([9], "star")
    inputs, windows, weights, bias = problem(rows)
    found = tree_conv(inputs, windows.clone(), weights, bias, rows, silu=True)
    chain = torch.arange(-1, 8, dtype=torch.int32, device=DEVICE)
    spoilt = tree_conv(
        inputs, windows.clone(), weights, bias, replace(rows, parents=chain), silu=True
    )
    assert torch.equal(found[:2], spoilt[:2])
    assert ((found[2:9] - spoilt[2:9]).abs().amax(1) > 0.01).all()
