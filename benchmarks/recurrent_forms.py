"""Time the two forms of a delta rule over trees: a state per node, or inputs and a fold.

    python -m benchmarks.recurrent_forms --rows 2 4 8 16 32 64 --requests 1 4 16
    python -m benchmarks.recurrent_forms --layer kda

A layer has the sizes of Qwen3-Next's: 16 heads of keys and 32 of values, of 128 numbers, states in
float32, inputs in bfloat16. With `--layer kda` it has those of Kimi Linear's, whose heads of keys
are 32, and a decay per key. Times are microseconds per layer and step, of calls in one CUDA graph:
the pass over all rows, and what follows for a path of three accepted rows (`states`: the move of
its last state; `inputs`: the fold, and the launch that finds no state to move). Each call works on
blocks of its own, so that caches don't help.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from benchmarks.attention.rows import in_turn
from vllm_graft.spec_decode.targets.recurrent.kernels.chunk import tree_chunk
from vllm_graft.spec_decode.targets.recurrent.kernels.gates import Decay, DeltaGates, KeyDecays
from vllm_graft.spec_decode.targets.recurrent.kernels.kept_rows import keep_rows
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrence import tree_recurrence
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_inputs import KeptRows, LayerInputs
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_rows import RecurrentRows
from vllm_graft.spec_decode.targets.recurrent.kernels.state_folds import (
    FoldedLayer,
    FoldTable,
    fold_states,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.state_moves import (
    RecurrentCache,
    StateTable,
    move_states,
)
from vllm_graft.spec_decode.tuning.attention_timing import graph_time

KEY_HEADS, VALUE_HEADS, SIZE = 16, 32, 128
ACCEPTED = 3


class Layer(NamedTuple):
    """A layer's states and a batch of trees on it."""

    rows: RecurrentRows
    inputs: torch.Tensor
    gates: DeltaGates | KeyDecays
    states: torch.Tensor
    windows: torch.Tensor
    outputs: torch.Tensor
    path: torch.Tensor
    counts: torch.Tensor


def gates_of(kind: str, rows: int, device: str) -> DeltaGates | KeyDecays:
    """Random gates of the layer `kind`."""
    bf16 = {"dtype": torch.bfloat16, "device": device}
    betas, rates = torch.randn(rows, VALUE_HEADS, **bf16), torch.randn(VALUE_HEADS, device=device)
    if kind == "kda":
        decays = torch.randn(rows, VALUE_HEADS, SIZE, **bf16)
        bias = torch.randn(VALUE_HEADS * SIZE, device=device)
        return KeyDecays(decays, betas, rates, bias, None)
    decays, bias = torch.randn(rows, VALUE_HEADS, **bf16), torch.randn(VALUE_HEADS, **bf16)
    return DeltaGates(decays, betas, rates, bias)


def layer(requests: int, rows: int, device: str = "cuda", kind: str = "delta") -> Layer:
    """Binary trees: the row ``(i - 1) // 2`` comes before row ``i``."""
    count, ints = requests * rows, {"dtype": torch.int32, "device": device}
    parents = torch.tensor([-1, *((row - 1) // 2 for row in range(1, rows))], **ints)
    columns = torch.arange(1, count + 1, **ints).view(requests, rows)
    starts = torch.arange(0, count + 1, rows, **ints)
    one = torch.ones(requests, **ints)
    path = torch.zeros(requests, rows, **ints)
    accepted = min(ACCEPTED, rows.bit_length())
    for depth in range(1, accepted):
        path[:, depth] = 2 * path[:, depth - 1] + 2
    accepted = int((path[0, :accepted] < rows).sum())
    bf16 = {"dtype": torch.bfloat16, "device": device}
    heads = VALUE_HEADS if kind == "kda" else KEY_HEADS
    width = 2 * heads * SIZE + VALUE_HEADS * SIZE
    return Layer(
        RecurrentRows(parents.repeat(requests), starts, columns, one, requests),
        torch.randn(count, width, **bf16),
        gates_of(kind, count, device),
        torch.randn(count + 1, VALUE_HEADS, SIZE, SIZE, device=device) * 0.1,
        torch.zeros(count + 1, 8, 2 + rows, device=device),
        torch.zeros(count, VALUE_HEADS, SIZE, **bf16),
        path,
        one * accepted,
    )


def move(given: Layer, kept: KeptRows | None = None) -> Callable[[], None]:
    """What moves the states that rows have left, and a window of eight features."""
    rows = given.rows
    cache = RecurrentCache(given.windows, given.states, 4, rows.columns, 64)
    table = StateTable.build([cache], by_prefix=False)
    drafts = given.counts * 0 + rows.columns.shape[1] - 1
    starts, lens = rows.query_start_loc, given.counts

    def run() -> None:
        move_states(table, given.path, given.counts, drafts, lens, rows.num_reqs, kept, starts)

    return run


def writing(given: Layer) -> tuple[Callable[[], None], Callable[[], None]]:
    """The pass that writes states, and the move behind it."""
    rows, gates = given.rows, given.gates

    groups = VALUE_HEADS if isinstance(gates, KeyDecays) else KEY_HEADS

    def run() -> None:
        tree_recurrence(given.inputs, gates, given.states, rows, given.outputs, groups=groups)

    return run, move(given)


def keeping(given: Layer) -> tuple[Callable[[], None], Callable[[], None]]:
    """The pass that keeps inputs, and the fold behind it."""
    rows, count, gates = given.rows, len(given.inputs), given.gates
    kept = KeptRows.allocate(count, count, given.states.device)
    by_key = isinstance(gates, KeyDecays)
    numbers = SIZE + 1 if by_key else 2
    inputs = LayerInputs(given.inputs, given.states.new_zeros(count, numbers, VALUE_HEADS))
    moved = move(given, kept)
    most = rows.columns.shape[1]
    keep_rows(kept, rows, None, most)
    folded = FoldedLayer(
        inputs,
        given.states,
        None if by_key else gates.log_rates,
        None if by_key else gates.decay_bias,
        VALUE_HEADS if by_key else KEY_HEADS,
        rows.columns,
        block_size=64,
        decay=Decay.BY_KEY if by_key else Decay.SCALAR,
    )
    table = FoldTable.build([folded], by_prefix=False)

    def run() -> None:
        tree_chunk(
            given.inputs,
            gates,
            given.states,
            rows,
            kept,
            inputs.gates,
            given.outputs,
            groups=folded.groups,
            max_rows=most,
        )

    def commit() -> None:
        starts = rows.query_start_loc
        fold_states(table, kept, starts, given.path, given.counts, given.counts, rows.num_reqs)
        moved()

    return run, commit


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--layer", choices=("delta", "kda"), default="delta")
    arguments = parser.parse_args(argv)
    print("| requests | rows | states | move | inputs | fold | states / inputs |")
    print("|---|---|---|---|---|---|---|")
    for requests in arguments.requests:
        for rows in arguments.rows:
            # At least 200 MB of states in all, and four layers.
            copies = max(4, 100 // (requests * rows))
            layers = [layer(requests, rows, kind=arguments.layer) for _ in range(copies)]
            times: list[float] = []
            for form in (writing, keeping):
                for calls in zip(*(form(each) for each in layers)):
                    times.append(graph_time(in_turn(calls), calls=copies))
            ratio = (times[0] + times[1]) / (times[2] + times[3])
            cells = " | ".join(f"{time:.1f}" for time in times)
            print(f"| {requests} | {rows} | {cells} | {ratio:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
