"""Recurrences over trees in plain float32, a row at a time: the oracle of the kernels' tests."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from vllm_graft.spec_decode.targets.recurrent.kernels.gates import (
    DeltaGates,
    KeyDecays,
    RecurrentRows,
    SelectiveGates,
)


def requests(rows: RecurrentRows) -> list[tuple[int, int, int]]:
    """The first row, the number of rows and the batch row of each request that has any."""
    starts = rows.query_start_loc.tolist()
    spans = zip(starts, starts[1:], range(rows.num_reqs))
    return [(first, end - first, req) for first, end, req in spans if end > first]


def path_to(rows: RecurrentRows, first: int, row: int) -> list[int]:
    """The rows of a request from its first one down to `row`."""
    path = [row]
    while (parent := int(rows.parents[first + path[-1]])) >= 0:
        path.append(parent)
    return path[::-1]


def tree_conv_reference(
    inputs: torch.Tensor,
    windows: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    rows: RecurrentRows,
    *,
    silu: bool,
) -> torch.Tensor:
    """The plain counterpart of `tree_conv`: a row's whole path is convolved, windows are rolled."""
    outputs = torch.zeros(inputs.shape, dtype=torch.float32)
    width = weights.shape[1]
    for first, count, req in requests(rows):
        block, offset = int(rows.columns[req, 0]), int(rows.num_accepted[req]) - 1
        if block <= 0:
            continue
        old = windows[block, :, offset : offset + width - 1].T.clone()
        own = inputs[first : first + count].to(windows.dtype)
        for row in range(count):
            line = torch.cat([old, own[path_to(rows, first, row)]])[-width:].float()
            total = (line * weights.float().T).sum(0)
            total = total if bias is None else total + bias.float()
            outputs[first + row] = F.silu(total) if silu else total
        windows[block, :, : width - 2 + count] = torch.cat([old[1:], own]).T
    return outputs


def descend(
    states: torch.Tensor, which: RecurrentRows, advance: Callable[[int, torch.Tensor], torch.Tensor]
) -> None:
    """Let each row continue its parent's state, and store what it leaves in its column."""
    for first, count, req in requests(which):
        columns = which.columns[req].tolist()
        before = columns[int(which.num_accepted[req]) - 1]
        if before <= 0:
            continue
        root = states[before].float().clone()
        after: list[torch.Tensor] = []
        for row in range(first, first + count):
            parent = int(which.parents[row])
            after.append(advance(row, after[parent] if parent >= 0 else root))
        for column, state in zip(columns, after):
            if column > 0:
                states[column] = state.to(states.dtype)


def _delta_rules(
    rows: torch.Tensor,
    betas: torch.Tensor,
    states: torch.Tensor,
    which: RecurrentRows,
    key_heads: int,
    decay_of: Callable[[int], torch.Tensor],
) -> torch.Tensor:
    """A row's share of its value takes the place of what its key held in ``[heads, V, K]``."""
    _, heads, value, key = states.shape
    outputs = torch.zeros(len(rows), heads, value)
    sizes = [key_heads * key, key_heads * key, heads * value]

    def advance(row: int, state: torch.Tensor) -> torch.Tensor:
        q, k, v = rows[row].float().split(sizes)
        q, k = (F.normalize(each.view(key_heads, key), eps=0) for each in (q, k))
        q, k = (each.repeat_interleave(heads // key_heads, 0) for each in (q * key**-0.5, k))
        state = state * decay_of(row)
        change = v.view(heads, value) - (state * k[:, None]).sum(-1)
        state = (
            state + (change * torch.sigmoid(betas[row].float())[:, None])[:, :, None] * k[:, None]
        )
        outputs[row] = (state * q[:, None]).sum(-1)
        return state

    descend(states, which, advance)
    return outputs


def tree_delta_rule_reference(
    rows: torch.Tensor,
    gates: DeltaGates,
    states: torch.Tensor,
    which: RecurrentRows,
    *,
    key_heads: int,
) -> torch.Tensor:
    """The plain counterpart of `tree_recurrence` of GDN: f32 ``[num_rows, value_heads, V]``."""

    def decay_of(row: int) -> torch.Tensor:
        step = F.softplus(gates.decays[row].float() + gates.decay_bias.float())
        return torch.exp(-gates.log_rates.float().exp() * step)[:, None, None]

    return _delta_rules(rows, gates.betas, states, which, key_heads, decay_of)


def tree_key_decays_reference(
    rows: torch.Tensor, gates: KeyDecays, states: torch.Tensor, which: RecurrentRows
) -> torch.Tensor:
    """The plain counterpart of `tree_recurrence` of KDA: f32 ``[num_rows, heads, V]``."""
    _, heads, _, key = states.shape
    rates = gates.log_rates.float().exp()[:, None]

    def decay_of(row: int) -> torch.Tensor:
        x = gates.decays[row].float() + gates.decay_bias.float().view(heads, key)
        if gates.lower_bound is None:
            return torch.exp(-rates * F.softplus(x))[:, None]
        return torch.exp(gates.lower_bound * torch.sigmoid(rates * x))[:, None]

    return _delta_rules(rows, gates.betas, states, which, heads, decay_of)


def tree_selective_update_reference(
    rows: torch.Tensor,
    gates: SelectiveGates,
    states: torch.Tensor,
    which: RecurrentRows,
    *,
    groups: int,
) -> torch.Tensor:
    """The plain counterpart of `tree_recurrence` of Mamba-2: f32 ``[num_rows, heads, P]``."""
    _, heads, value, size = states.shape
    outputs = torch.zeros(len(rows), heads, value)

    def advance(row: int, state: torch.Tensor) -> torch.Tensor:
        parts = rows[row].float().split([heads * value, groups * size, groups * size])
        x = parts[0].view(heads, value)
        b, c = (each.view(groups, size).repeat_interleave(heads // groups, 0) for each in parts[1:])
        step = F.softplus(gates.steps[row].float() + gates.step_bias.float())
        state = state * torch.exp(gates.rates.float() * step)[:, None, None]
        state = state + x[:, :, None] * (b * step[:, None])[:, None]
        skipped = x * gates.skips.float()[:, None]
        outputs[row] = (state * c[:, None]).sum(-1) + skipped
        return state

    descend(states, which, advance)
    return outputs
