"""Launches a product by a plan, or by PyTorch, which takes cuBLAS."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.products.plan import PARTIAL_BYTES, Plan, grid_of, padded_rows
from benchmarks.products.shapes import Product
from benchmarks.products.small_kernels import early
from benchmarks.products.tile_kernel import tile_product
from vllm_graft.spec_decode.kernels.listed_launch import Launch, listing

LEAST_TILE = 16

RELATIVE = 1e-2
"""Largest norm of the error, over that of the output: rounding to bfloat16."""


@dataclass(frozen=True)
class Space:
    """Memory of products, which all of them use in turn.

    Attributes:
        partial: float32, partial tiles.
        arrived: int32, zero for each tile: how many programs have written their part.
        multiprocessors: of the device.
    """

    partial: torch.Tensor
    arrived: torch.Tensor
    multiprocessors: int

    @classmethod
    def allocate(cls, products: tuple[Product, ...], multiprocessors: int, device: str) -> Space:
        """Allocate what any plan of these products needs."""
        tiles = max(each.columns for each in products) // LEAST_TILE
        # On meta no memory is taken.
        return cls(
            torch.empty(PARTIAL_BYTES // 4, dtype=torch.float32, device=device),
            torch.zeros(tiles, dtype=torch.int32, device=device),
            multiprocessors,
        )


def multiply(
    plan: Plan | None,
    product: Product,
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    space: Space,
) -> None:
    """Compute ``out = x weight^T``.

    Args:
        plan: how; None takes PyTorch's own product, as ``torch.nn.functional.linear`` does.
        product: its sizes.
        x: bfloat16 ``[rows, depth]``.
        weight: bfloat16 ``[columns, depth]``.
        out: bfloat16 ``[rows, columns]``, takes the result.
        space: memory.
    """
    if plan is None:
        torch.mm(x, weight.t(), out=out)
        return
    rows = x.shape[0]
    grid = grid_of(plan, product, space.multiprocessors)
    arguments = (x, weight, out, space.partial, space.arrived)
    sizes = (rows, product.columns, product.depth, grid.share)
    shared = {
        "ROWS": padded_rows(plan, rows), "TILE": plan.tile, "STEP": plan.step,
        "OVERLAPPED": plan.overlapped, "EARLY": plan.early, "AHEAD": plan.ahead,
    }  # fmt: skip
    options = {"num_warps": plan.warps, **early(plan.overlapped)}
    if plan.deep:
        from benchmarks.products.deep_kernel import deep_product

        deep_product[(grid.programs,)](
            *arguments, *sizes, **shared, STAGES=plan.stages, WARPS=plan.warps, **options
        )
    else:
        tile_product[(grid.programs,)](
            *arguments, *sizes, **shared, FLIP=plan.flip, ROLL=plan.roll,
            num_stages=plan.stages, **options,
        )  # fmt: skip


def launches_of(plan: Plan, product: Product, rows: int, multiprocessors: int) -> list[Launch]:
    """The kernels that a plan needs, without a launch."""
    found: list[Launch] = []
    x, weight, out = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta")
        for shape in (
            (rows, product.depth),
            (product.columns, product.depth),
            (rows, product.columns),
        )
    )
    space = Space.allocate((product,), multiprocessors, "meta")
    with listing(found.append):
        multiply(plan, product, x, weight, out, space)
    return found
