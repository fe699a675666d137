"""Rows of a batch that recurrent layers compute as trees, and what such layers keep of them."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.listed_launch import Kernel
from vllm_graft.spec_decode.kernels.sizes import next_power_of_2

MAX_ROWS = 64
"""Rows of a request whose ancestors fit the bits of an integer."""


@dataclass(frozen=True)
class RecurrentRows:
    """Rows of the requests that vLLM verifies drafts of, request after request.

    A request has a *column* for each of its rows: a block that keeps the state after this row.

    Attributes:
        parents: i32 ``[num_rows]``, the row that a row continues, counted from the first row of its
            request; -1 for the first one. Parents come before children.
        query_start_loc: i32 ``[>= num_reqs + 1]``, the first row of each request.
        columns: i32 ``[>= num_reqs, num_nodes + 1]``, blocks; 0 is the null block, which is neither
            read nor written.
        num_accepted: i32 ``[>= num_reqs]``, how many rows of the step before count: the first row
            continues the state in column ``num_accepted - 1``.
        num_reqs: requests, padding of a graph included.
    """

    parents: torch.Tensor
    query_start_loc: torch.Tensor
    columns: torch.Tensor
    num_accepted: torch.Tensor
    num_reqs: int


class LayerInputs(NamedTuple):
    """What a recurrent layer keeps of the rows of a pass.

    Attributes:
        rows: ``[max_rows, features]``, what is behind the convolution, of the layer's dtype.
            Features of a delta rule are queries, keys and values, those of Mamba-2 inputs, ``B``
            and ``C``.
        gates: f32 ``[max_rows, gates, heads]``. Gates of the gated delta rule are decays before the
            softplus and betas before the sigmoid, the one of Mamba-2 is steps before the softplus.
            Of Kimi delta attention they are ``K + 1``: a row's memory has ``heads * K`` logarithms
            of decays, then ``heads`` betas behind the sigmoid.
    """

    rows: torch.Tensor
    gates: torch.Tensor

    @classmethod
    def allocate(
        cls,
        max_rows: int,
        features: int,
        gates: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Self:
        rows = torch.zeros(max_rows, features, dtype=dtype, device=device)
        return cls(rows, torch.zeros(max_rows, *gates, device=device))

    @property
    def nbytes(self) -> int:
        return int(self.rows.nbytes) + int(self.gates.nbytes)


@dataclass(frozen=True)
class KeptRows:
    """Which requests of a pass have left inputs in place of states, and where.

    Addresses are stable, so CUDA graphs may hold them. The first two have a request's numbers at
    its first row in the batch.

    Attributes:
        firsts: i32 ``[max_tokens]``, the first of its rows in the layers' buffers, or -1 if its
            states were written in the pass.
        accepted: i32 ``[max_tokens]``: its state is in column ``accepted - 1``.
        masks: i64 ``[max_rows]``; bit ``j`` is set if a row of the buffers continues the ``j``-th
            row of its request, or is it.
    """

    firsts: torch.Tensor
    accepted: torch.Tensor
    masks: torch.Tensor

    @property
    def max_rows(self) -> int:
        return len(self.masks)

    @classmethod
    def allocate(cls, max_tokens: int, max_rows: int, device: torch.device | str) -> Self:
        """Allocate for batches of `max_tokens` rows, `max_rows` of which may be kept."""
        firsts, accepted = torch.full((2, max_tokens), -1, dtype=torch.int32, device=device)
        masks = torch.zeros(max_rows, dtype=torch.int64, device=device)
        return cls(firsts, accepted, masks)


@Kernel
@triton.jit
def _keep_rows_kernel(
    query_start_loc, num_accepted, parents, batch_rows, firsts, accepted, masks, ROWS: tl.constexpr
):
    req = tl.program_id(0)
    first = tl.load(query_start_loc + req)
    num_rows = tl.load(query_start_loc + req + 1) - first
    if num_rows <= 0:
        return
    row = tl.arange(0, ROWS)
    inside = row < num_rows
    ancestor = tl.where(inside, row, -1)
    found = tl.zeros([ROWS], tl.int64)
    for _ in range(0, num_rows):
        bit = tl.full([ROWS], 1, tl.int64) << tl.maximum(ancestor, 0).to(tl.int64)
        found |= tl.where(ancestor >= 0, bit, 0)
        ancestor = tl.load(parents + first + ancestor, mask=ancestor >= 0, other=-1)
    tl.store(masks + first + row, found, mask=inside)
    place = first.to(tl.int64)
    if batch_rows is not None:
        place = tl.load(batch_rows + first).to(tl.int64)
    tl.store(firsts + place, first)
    tl.store(accepted + place, tl.load(num_accepted + req))


def keep_rows(
    kept: KeptRows, which: RecurrentRows, batch_rows: torch.Tensor | None, rows: int
) -> None:
    """Note that the rows of trees in a pass, at most `rows` of a request, are kept as inputs.

    `batch_rows` is i32 or i64 ``[num_rows]``, the rows' places in the batch; None if they lead it.
    """
    if which.num_reqs == 0:
        return
    _keep_rows_kernel[(which.num_reqs,)](
        which.query_start_loc,
        which.num_accepted,
        which.parents,
        batch_rows,
        kept.firsts,
        kept.accepted,
        kept.masks,
        ROWS=next_power_of_2(rows),
        num_warps=1,
    )


@triton.jit
def request_of(req, query_start_loc, num_accepted, columns, column_stride):
    """A request's first row, number of rows, blocks of the rows' states, and block before them.

    That is 0, vLLM's null block, in a graph's padding and without rows.
    """
    first = tl.load(query_start_loc + req).to(tl.int64)
    num_rows = tl.load(query_start_loc + req + 1) - first
    columns += req * column_stride
    accepted = tl.load(num_accepted + req, mask=num_rows > 0, other=1)
    before = tl.load(columns + accepted - 1, mask=num_rows > 0, other=0).to(tl.int64)
    return first, num_rows, columns, before


def require_contiguous(states: torch.Tensor, outputs: torch.Tensor) -> None:
    """Raise a `ValueError` if the kernels would not find elements within a block or a row."""
    _, _, value, key = states.shape
    if states.stride()[1:] != (value * key, key, 1) or outputs.stride()[1:] != (value, 1):
        raise ValueError(
            f"states and outputs must be contiguous within a block and a row, got strides "
            f"{states.stride()} and {outputs.stride()}"
        )
