"""Whether a pass over trees writes a recurrent state per row, or keeps the rows' inputs instead.

A state is large: 2 MiB a layer in Qwen3-Next and Nemotron-H, against some 16 KiB of a row's inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_rows import (
    MAX_ROWS,
    KeptRows,
    LayerInputs,
    keep_rows,
)

if TYPE_CHECKING:
    import torch

    from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_rows import RecurrentRows
    from vllm_graft.spec_decode.verification.context import TreeContext

_LEAST_ROWS = 4
"""Rows of a request from which on inputs are kept: states would be moved five times and more, in
place of three times."""


def allocate_inputs(
    weight: torch.Tensor,
    gates: tuple[int, int],
    context: TreeContext,
    dtype: torch.dtype | None = None,
) -> LayerInputs:
    """Memory for the inputs of a layer. What all layers share is allocated with the first one.

    Args:
        weight: ``[features, ...]`` of its convolution.
        gates: numbers per head that a row's gates are, and heads.
        dtype: of what is behind the convolution; None for the weight's.
    """
    max_reqs, width = context.path.shape
    max_tokens = len(context.rows.row_parents)
    max_rows = min(max_tokens, max_reqs * width)
    if context.kept is None:
        context.kept = KeptRows.allocate(max_tokens, max_rows, weight.device)
    inputs = LayerInputs.allocate(
        max_rows, weight.shape[0], gates, dtype or weight.dtype, weight.device
    )
    context.kept_bytes += inputs.nbytes
    return inputs


class Batch(NamedTuple):
    """Rows of a pass that drafts are verified in, as the host knows them.

    `requests` and `padded` (rows) include a graph's padding; `most` is of one request.
    """

    rows: int
    requests: int
    most: int
    padded: int


def keeps_inputs(batch: Batch, context: TreeContext) -> bool:
    """Whether the rows' inputs are kept, by host values alone: a graph is captured in one form."""
    kept = context.kept
    if kept is None or max(batch.rows, batch.padded) > kept.max_rows:
        return False
    if batch.most > MAX_ROWS or batch.rows <= batch.requests:
        return False
    return context.recurrent_form == "inputs" or batch.rows >= _LEAST_ROWS * batch.requests


def keep_inputs(
    batch: Batch, rows: RecurrentRows, batch_rows: torch.Tensor | None, context: TreeContext
) -> int:
    """Note that a pass keeps its rows' inputs, if it does; `batch_rows` is as of `keep_rows`.

    Returns:
        The most rows of a request, or 0 where the pass writes states.
    """
    if context.kept is None or not keeps_inputs(batch, context):
        return 0
    keep_rows(context.kept, rows, batch_rows, batch.most)
    return batch.most
