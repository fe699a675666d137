"""What decays a recurrent state, and how a row continues it: three kinds, one notation.

A head's state is a matrix ``S`` ``[V, K]``. A row decays it, writes a value ``v`` ``[V]`` under a
key ``k`` ``[K]``, and reads it with a query ``q`` ``[K]``. There are three kinds of decay:

- a number per head: the gated delta rule (GDN; Yang et al. 2024, arXiv 2412.06464). A share
  ``beta`` of the value replaces what the state holds under the key, whose length is 1;
- a number per key, so per column of the state: Kimi Delta Attention (KDA, arXiv 2510.26692), which
  replaces values in the same way;
- selective: Mamba-2 (Dao and Gu 2024, arXiv 2405.21060). One step per row and head both decays the
  state and weighs what is added. There ``K`` is called ``N`` and ``V`` is called ``P``. ``B`` is
  the key, ``C`` the query, and the input ``x`` is the value.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.kernel_launch import Kernel, next_power_of_2

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
        columns: i32 ``[>= num_reqs, num_nodes + 1]``, blocks; the null block 0 is left alone.
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
            Features are queries, keys and values, or (Mamba-2) inputs, ``B`` and ``C``.
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

    CUDA graphs may hold the addresses. The first two have numbers at a request's first row.

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
    `batch_rows`, i32 or i64 ``[num_rows]``, has their places in the batch; None: they lead."""
    if which.num_reqs == 0:
        return
    _keep_rows_kernel[(which.num_reqs,)](
        which.query_start_loc, which.num_accepted, which.parents, batch_rows, kept.firsts,
        kept.accepted, kept.masks,
        ROWS=next_power_of_2(rows), num_warps=1,
    )  # fmt: skip


@triton.jit
def request_of(req, query_start_loc, num_accepted, columns, column_stride):
    """A request's first row, number of rows, blocks of the rows' states, and block before them.
    That is 0, vLLM's null block, in a graph's padding and without rows."""
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


class Decay(enum.IntEnum):
    """Kinds of decay."""

    SCALAR = 1
    BY_KEY = 2
    SELECTIVE = 3


_BY_KEY = tl.constexpr(int(Decay.BY_KEY))
_SELECTIVE = tl.constexpr(int(Decay.SELECTIVE))

_TILES = {Decay.SCALAR: (32, 4), Decay.BY_KEY: (8, 1), Decay.SELECTIVE: (32, 4)}


def tile_of(decay: Decay, value: int) -> tuple[int, int]:
    """Rows of a state of `value` rows that a program keeps, and its warps. So sums over keys are
    taken in the order of vLLM's kernels for chains."""
    most, warps = _TILES[decay]
    return min(most, next_power_of_2(value)), warps


def numbers_of(decay: Decay, key: int) -> int:
    """Numbers per row and head that are kept of the gates of states with `key` columns."""
    return {Decay.SCALAR: 2, Decay.BY_KEY: key + 1, Decay.SELECTIVE: 1}[decay]


class DeltaGates(NamedTuple):
    """Gates of the gated delta rule.

    Attributes:
        decays: ``[num_rows, heads]``, before ``softplus``.
        betas: ``[num_rows, heads]``, before the sigmoid.
        log_rates: f32 ``[heads]``, logarithms of the rates of decay.
        decay_bias: ``[heads]``, added to ``decays``.
    """

    decays: torch.Tensor
    betas: torch.Tensor
    log_rates: torch.Tensor
    decay_bias: torch.Tensor


class KeyDecays(NamedTuple):
    """Gates of Kimi Delta Attention, as `DeltaGates` but for these. `decays`: ``[num_rows, heads,
    K]``, before the activation; contiguous within a row. `decay_bias`: f32 ``[heads * K]``, added
    to ``decays``. `lower_bound`: of the logarithm of a decay, negative: decays are
    ``exp(lower_bound * sigmoid(rate * x))``. None for ``exp(-rate * softplus(x))``."""

    decays: torch.Tensor
    betas: torch.Tensor
    log_rates: torch.Tensor
    decay_bias: torch.Tensor
    lower_bound: float | None


class SelectiveGates(NamedTuple):
    """Gates of Mamba-2.

    Attributes:
        steps: ``[num_rows, heads]``, before ``softplus``.
        rates: f32 ``[heads]``, negative rates of decay (``A``).
        step_bias: ``[heads]``, added to ``steps``.
        skips: ``[heads]``, share of the input that is added to the output (``D``).
    """

    steps: torch.Tensor
    rates: torch.Tensor
    step_bias: torch.Tensor
    skips: torch.Tensor


Gates = DeltaGates | KeyDecays | SelectiveGates


def arguments_of(
    rows: torch.Tensor,
    gates: Gates,
    states: torch.Tensor,
    which: RecurrentRows,
    outputs: torch.Tensor,
    groups: int,
) -> dict[str, Any]:
    """What a recurrence's kernel takes of such rows, by name; arguments as of `tree_recurrence`."""
    decay, lower_bound = Decay.SCALAR, None
    if isinstance(gates, SelectiveGates):
        decay, betas = Decay.SELECTIVE, None
        decays, rates, bias, skips = gates
    else:
        if isinstance(gates, KeyDecays):
            decay, lower_bound = Decay.BY_KEY, gates.lower_bound
        (decays, betas, rates, bias), skips = gates[:4], None
    _, heads, value, key = states.shape
    return {
        "rows": rows, "decays": decays, "betas": betas, "rates": rates, "bias": bias,
        "skips": skips, "states": states, "outputs": outputs,
        "columns": which.columns, "num_accepted": which.num_accepted,
        "query_start_loc": which.query_start_loc, "parents": which.parents,
        "scale": key**-0.5, "lower_bound": 0.0 if lower_bound is None else lower_bound,
        "row_stride": rows.stride(0), "decay_stride": decays.stride(0),
        "beta_stride": 0 if betas is None else betas.stride(0),
        "block_stride": states.stride(0), "column_stride": which.columns.stride(0),
        "output_stride": outputs.stride(0),
        "DECAY": int(decay), "BOUNDED": lower_bound is not None, "GROUPS": groups,
        "HEADS": heads, "KEY": key, "VALUE": value,
    }  # fmt: skip


@triton.jit
def softplus(x):
    """``log(1 + exp(x))``, which is `x` itself where that is large, as in vLLM's kernels."""
    return tl.where(x <= 20.0, tl.log(1 + tl.exp(x)), x)


@triton.jit
def places_of(
    head,
    DECAY: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr,
):  # fmt: skip
    """Where a row has a head's query, key and value. Queries, keys and values of all heads lie
    behind each other; of Mamba-2 values, keys, queries."""
    group = head // (HEADS // GROUPS)
    if DECAY == _SELECTIVE:
        value = head * VALUE
        key = HEADS * VALUE + group * KEY
        query = key + GROUPS * KEY
    else:
        query = group * KEY
        key = GROUPS * KEY + group * KEY
        value = 2 * GROUPS * KEY + head * VALUE
    return query, key, value


@triton.jit
def rate_of(rates, head, DECAY: tl.constexpr):
    """A head's rate of decay."""
    rate = tl.load(rates + head).to(tl.float32)
    if DECAY != _SELECTIVE:
        rate = tl.exp(rate)
    return rate


@triton.jit
def log_decay(x, rate, lower_bound, BOUNDED: tl.constexpr):
    """Logarithms of decays of a delta rule from `x`, with its bias and before the activation."""
    return lower_bound * tl.sigmoid(rate * x) if BOUNDED else -rate * softplus(x)


@triton.jit
def gated(x, beta, rate, lower_bound, DECAY: tl.constexpr, BOUNDED: tl.constexpr):
    """Logarithms of decays, and the shares of values that enter the state, of `x` with its bias."""
    if DECAY == _SELECTIVE:
        share = softplus(x)
        decay = rate * share
    else:
        share = tl.sigmoid(beta)
        decay = log_decay(x, rate, lower_bound, BOUNDED)
    return decay, share


@triton.jit
def of_length_one(x, DECAY: tl.constexpr):
    """A query or key of a delta rule, as vLLM's kernel for chains makes it."""
    square = tl.sum(x * x) + 1e-6
    return x / tl.sqrt(square) if DECAY == _BY_KEY else x * tl.rsqrt(square)


@triton.jit
def stepped(state, key, value, decay, share, DECAY: tl.constexpr):
    """The state ``[V, K]`` behind a row; `decay` is a logarithm, ``[K]`` where it is by key."""
    if DECAY == _SELECTIVE:
        # By the power of two, as in vLLM's kernel for chains.
        state = state * tl.exp2(1.4426950408889634 * decay)
        state += (key * share)[None, :] * value[:, None]
    else:
        if DECAY == _BY_KEY:
            decay = decay[None, :]
        state *= tl.exp(decay)
        change = (value - tl.sum(state * key[None, :], 1)) * share
        state += change[:, None] * key[None, :]
    return state
