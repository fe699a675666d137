"""Batches of random trees for recurrent layers, and vLLM's own kernels for chains."""

import contextlib
from dataclasses import replace
from typing import NamedTuple

import torch

from tests.support.engines.kimi_layers import interpreted_kernels
from tests.support.engines.recurrent_layers import triton_convolutions, triton_states
from tests.support.references.recurrence_reference import (
    path_to,
    tree_delta_rule_reference,
    tree_key_decays_reference,
    tree_selective_update_reference,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.gates import (
    DeltaGates,
    KeyDecays,
    RecurrentRows,
    SelectiveGates,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Gates = DeltaGates | KeyDecays | SelectiveGates


class Heads(NamedTuple):
    """Sizes of a recurrent layer; those of Mamba-2 have groups and states in the place of keys."""

    key_heads: int = 2
    value_heads: int = 4
    key: int = 16
    value: int = 16

    @property
    def dim(self) -> int:
        return 2 * self.key_heads * self.key + self.value_heads * self.value


def on_cpu(rows: RecurrentRows) -> RecurrentRows:
    return replace(rows, **{k: v.cpu() for k, v in vars(rows).items() if k != "num_reqs"})


def deepest(rows: RecurrentRows, first: int, size: int) -> list[int]:
    """The longest path of a request of `size` rows, the first of which is `first`."""
    paths = (path_to(on_cpu(rows), first, row) for row in range(size))
    return max(paths, key=len)


def alone(rows: RecurrentRows, req: int, length: int) -> RecurrentRows:
    """A request by itself, as a chain of `length` rows."""
    return replace(
        rows,
        query_start_loc=torch.tensor([0, length], dtype=torch.int32, device=DEVICE),
        columns=rows.columns[req : req + 1],
        num_accepted=rows.num_accepted[req : req + 1],
        num_reqs=1,
    )


def parents_of(kind: str, rows: int, generator: torch.Generator) -> list[int]:
    if kind == "chain":
        return list(range(-1, rows - 1))
    if kind == "star":
        return [-1, *[0] * (rows - 1)]
    drawn = [int(torch.randint(0, row, (1,), generator=generator)) for row in range(1, rows)]
    return [-1, *drawn]


def rows_of(sizes: list[int], kind: str, seed: int = 0, padding: int = 0) -> RecurrentRows:
    """Requests with so many rows each; their columns are blocks from 1 on, in a random order."""
    generator = torch.Generator().manual_seed(seed)
    parents = [parent for size in sizes for parent in parents_of(kind, size, generator)]
    width = max(sizes)
    blocks = torch.randperm(len(sizes) * width, generator=generator).view(-1, width) + 1
    blocks = torch.cat([blocks, torch.zeros(padding, width, dtype=torch.int64)])
    starts = torch.tensor([0, *sizes, *[0] * padding]).cumsum(0)
    accepted = torch.tensor([1 + (7 * req) % width for req in range(len(sizes))] + [1] * padding)
    tensors = [torch.tensor(parents), starts, blocks, accepted]
    given = (tensor.to(DEVICE, torch.int32) for tensor in tensors)
    own, first, columns, counts = given
    return RecurrentRows(own, first, columns, counts, len(sizes) + padding)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype)


def states_of(
    rows: RecurrentRows, heads: Heads, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Blocks lie further apart than their states are long."""
    blocks = int(rows.columns.max()) + 1
    size = heads.value_heads * heads.value * heads.key
    pages = random(blocks, size + 64, seed=5, dtype=dtype)
    shape = (blocks, heads.value_heads, heads.value, heads.key)
    return pages[:, :size].unflatten(1, shape[1:])


def copied(states: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides."""
    copy = torch.empty_strided(states.shape, states.stride(), dtype=states.dtype, device=DEVICE)
    return copy.copy_(states)


def gates_of(rows: int, heads: Heads, dtype: torch.dtype = torch.float32) -> DeltaGates:
    value_heads = heads.value_heads
    return DeltaGates(
        random(rows, value_heads, seed=11, dtype=dtype),
        random(rows, value_heads, seed=12, dtype=dtype),
        random(value_heads, seed=13),
        random(value_heads, seed=14),
    )


def key_decays_of(
    rows: int, heads: Heads, dtype: torch.dtype = torch.float32, lower_bound: float | None = None
) -> KeyDecays:
    """Gates of rows whose heads of keys and of values are the same."""
    return KeyDecays(
        random(rows, heads.value_heads, heads.key, seed=11, dtype=dtype),
        random(rows, heads.value_heads, seed=12, dtype=dtype),
        random(heads.value_heads, seed=13),
        random(heads.value_heads * heads.key, seed=14),
        lower_bound,
    )


def selective_gates_of(rows: int, heads: Heads, dtype: torch.dtype) -> SelectiveGates:
    count = heads.value_heads
    return SelectiveGates(
        random(rows, count + 3, seed=11, dtype=dtype)[:, :count],
        -random(count, seed=12).exp(),
        random(count, seed=13, dtype=dtype),
        random(count, seed=14, dtype=dtype),
    )


def of_rows(gates: Gates, lines: list[int]) -> Gates:
    """The gates of some rows."""
    if isinstance(gates, SelectiveGates):
        return gates._replace(steps=gates.steps[lines])
    return gates._replace(decays=gates.decays[lines], betas=gates.betas[lines])


def stock_chain_conv(
    inputs: torch.Tensor,
    windows: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    rows: RecurrentRows,
) -> torch.Tensor:
    """Run vLLM's kernel over the rows as chains, with SiLU."""
    out: torch.Tensor = triton_convolutions().causal_conv1d_update(
        inputs.clone(),
        windows,
        weights,
        bias,
        "silu",
        conv_state_indices=rows.columns[: rows.num_reqs, 0],
        num_accepted_tokens=rows.num_accepted,
        query_start_loc=rows.query_start_loc,
        max_query_len=rows.columns.shape[1],
    )
    return out


def stock_chain_delta_rule(
    inputs: torch.Tensor, gates: DeltaGates, states: torch.Tensor, rows: RecurrentRows, heads: Heads
) -> torch.Tensor:
    """Run vLLM's kernel over the rows as chains: ``[num_rows, value_heads, V]``."""
    from vllm.third_party.flash_linear_attention.ops import fused_sigmoid_gating_delta_rule_update

    keys = heads.key_heads * heads.key
    q, k, v = inputs.split([keys, keys, heads.value_heads * heads.value], dim=-1)
    out, _ = fused_sigmoid_gating_delta_rule_update(
        A_log=gates.log_rates,
        a=gates.decays,
        b=gates.betas,
        dt_bias=gates.decay_bias,
        q=q.reshape(1, -1, heads.key_heads, heads.key),
        k=k.reshape(1, -1, heads.key_heads, heads.key),
        v=v.reshape(1, -1, heads.value_heads, heads.value),
        initial_state=states,
        inplace_final_state=True,
        cu_seqlens=rows.query_start_loc[: rows.num_reqs + 1],
        ssm_state_indices=rows.columns,
        num_accepted_tokens=rows.num_accepted,
        use_qk_l2norm_in_kernel=True,
    )
    return out.squeeze(0)


def stock_chain_key_decays(
    inputs: torch.Tensor, gates: KeyDecays, states: torch.Tensor, rows: RecurrentRows
) -> torch.Tensor:
    """Run vLLM's kernel over the rows as chains: ``[num_rows, heads, V]``."""
    from vllm.models.kimi_k3.nvidia.ops.third_party.kda import fused_recurrent_kda

    _, heads, value, key = states.shape
    parts = inputs.split([heads * key, heads * key, heads * value], dim=-1)
    q, k, v = (
        part.unflatten(1, (heads, size))[None] for part, size in zip(parts, (key, key, value))
    )
    with contextlib.nullcontext() if DEVICE == "cuda" else interpreted_kernels():
        out, _ = fused_recurrent_kda(
            q=q,
            k=k,
            v=v,
            raw_g=gates.decays[None],
            raw_beta=gates.betas[None],
            A_log=gates.log_rates,
            dt_bias=gates.decay_bias,
            lower_bound=gates.lower_bound,
            initial_state=states,
            cu_seqlens=rows.query_start_loc[: rows.num_reqs + 1],
            ssm_state_indices=rows.columns,
            num_accepted_tokens=rows.num_accepted,
        )
    return out.squeeze(0)


class Rule(NamedTuple):
    """A delta rule: with a decay per head, or per key, whose logarithm may be bounded. Or the
    selective state update of Mamba-2."""

    heads: Heads
    by_key: bool = False
    lower_bound: float | None = None
    selective: bool = False

    def gates(self, rows: int, dtype: torch.dtype = torch.float32) -> Gates:
        if self.selective:
            return selective_gates_of(rows, self.heads, dtype)
        if self.by_key:
            return key_decays_of(rows, self.heads, dtype, self.lower_bound)
        return gates_of(rows, self.heads, dtype)

    def looped(
        self, inputs: torch.Tensor, gates: Gates, states: torch.Tensor, rows: RecurrentRows
    ) -> torch.Tensor:
        """Outputs of a plain loop in float32 on the CPU, which continues the states there."""
        given = type(gates)(*(v.cpu() if isinstance(v, torch.Tensor) else v for v in gates))
        shared, heads = (states, on_cpu(rows)), self.heads.key_heads
        if isinstance(given, SelectiveGates):
            return tree_selective_update_reference(inputs.cpu(), given, *shared, groups=heads)
        if isinstance(given, KeyDecays):
            return tree_key_decays_reference(inputs.cpu(), given, *shared)
        return tree_delta_rule_reference(inputs.cpu(), given, *shared, key_heads=heads)

    def stock(
        self, inputs: torch.Tensor, gates: Gates, states: torch.Tensor, rows: RecurrentRows
    ) -> torch.Tensor:
        """Run vLLM's kernel over the rows as chains."""
        if isinstance(gates, SelectiveGates):
            out = inputs.new_zeros(len(inputs), *states.shape[1:3])
            groups = self.heads.key_heads
            triton_selective_update(inputs, gates, states, rows, out, groups=groups)
            return out
        if isinstance(gates, KeyDecays):
            return stock_chain_key_decays(inputs, gates, states, rows)
        return stock_chain_delta_rule(inputs, gates, states, rows, self.heads)


def triton_selective_update(
    inputs: torch.Tensor,
    gates: SelectiveGates,
    states: torch.Tensor,
    rows: RecurrentRows,
    outputs: torch.Tensor,
    *,
    groups: int,
) -> None:
    """Run vLLM's kernel of Mamba-2 over the rows as chains, into ``[num_rows, heads, P]``."""
    _, heads, value, size = states.shape
    parts = inputs.split([heads * value, groups * size, groups * size], dim=-1)
    x, b, c = (
        part.unflatten(1, shape)
        for part, shape in zip(parts, [(heads, value), (groups, size), (groups, size)])
    )

    def tied(each: torch.Tensor) -> torch.Tensor:
        return each[..., None].expand(*each.shape, value)

    triton_states().selective_state_update(
        states,
        x,
        tied(gates.steps),
        gates.rates[:, None, None].expand(heads, value, size),
        b,
        c,
        tied(gates.skips),
        tied(gates.step_bias),
        dt_softplus=True,
        state_batch_indices=rows.columns,
        dst_state_batch_indices=rows.columns,
        out=outputs,
        num_accepted_tokens=rows.num_accepted,
        cu_seqlens=rows.query_start_loc,
    )
