"""A layer's rows as kept inputs: the chunk over a tree, and the fold of an accepted path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.support.samples.recurrent_samples import (
    DEVICE,
    Gates,
    Heads,
    Rule,
    alone,
    deepest,
    of_rows,
    random,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.chunk import tree_chunk
from vllm_graft.spec_decode.targets.recurrent.kernels.gates import (
    Decay,
    KeptRows,
    KeyDecays,
    LayerInputs,
    RecurrentRows,
    SelectiveGates,
    keep_rows,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.state_folds import (
    FoldedLayer,
    FoldTable,
    fold_states,
)


@dataclass
class Kept:
    """Rows of a pass, and the layer that keeps their inputs.

    Its blocks are tables of columns: a request's columns begin at its first block. Requests have 40
    tokens, so that with blocks of 40 and more tokens columns begin there by prefix, too.
    """

    rows: RecurrentRows
    heads: Heads
    gates: Gates
    states: torch.Tensor
    inputs: LayerInputs
    kept: KeptRows

    @classmethod
    def of(
        cls,
        rows: RecurrentRows,
        heads: Heads,
        inputs: torch.Tensor,
        gates: Gates,
        dtype: torch.dtype = torch.float32,
    ) -> Kept:
        """Blocks lie further apart than their states are long."""
        blocks, count = int(rows.columns.max()) + 1, len(inputs)
        shape = (heads.value_heads, heads.value, heads.key)
        size = heads.value_heads * heads.value * heads.key
        pages = random(blocks, size + 64, seed=5, dtype=dtype) * 0.5
        numbers = {KeyDecays: heads.key + 1, SelectiveGates: 1}.get(type(gates), 2)
        kept = LayerInputs(
            torch.empty(count, heads.dim, dtype=inputs.dtype, device=DEVICE).copy_(inputs),
            torch.zeros(count, numbers, heads.value_heads, device=DEVICE),
        )
        return cls(
            rows,
            heads,
            gates,
            pages[:, :size].unflatten(1, shape),
            kept,
            KeptRows.allocate(count, count, DEVICE),
        )

    def folded(self, block_size: int = 64) -> FoldedLayer:
        # With columns by prefix a table has what comes before the last token's block, too.
        before = torch.zeros(self.rows.num_reqs, 39 // block_size, dtype=torch.int32, device=DEVICE)
        match self.gates:
            case KeyDecays():
                decay, own = Decay.BY_KEY, (None, None)
            case SelectiveGates(rates=rates, step_bias=bias):
                decay, own = Decay.SELECTIVE, (rates, bias)
            case gates:
                decay, own = Decay.SCALAR, (gates.log_rates, gates.decay_bias)
        return FoldedLayer(
            self.inputs,
            self.states,
            *own,
            self.heads.key_heads,
            torch.cat([before, self.rows.columns], 1),
            block_size,
            decay,
        )


def chunk(given: Kept) -> torch.Tensor:
    """Outputs of the rows; notes that their inputs are kept."""
    rows, most = given.rows, int(given.rows.query_start_loc.diff().max())
    keep_rows(given.kept, rows, None, most)
    shape = (len(given.inputs.rows), given.heads.value_heads, given.heads.value)
    out = torch.zeros(shape, device=DEVICE, dtype=given.inputs.rows.dtype)
    tree_chunk(
        given.inputs.rows,
        given.gates,
        given.states,
        rows,
        given.kept,
        given.inputs.gates,
        out,
        groups=given.heads.key_heads,
        max_rows=most,
    )
    return out


def fold(
    layers: Sequence[Kept],
    paths: Sequence[list[int]],
    *,
    by_prefix: bool = False,
    block_size: int = 64,
) -> None:
    """Continue the states along the paths; the first layer's rows are those of all."""
    first = layers[0]
    path = torch.full((len(paths), 65), 99, dtype=torch.int32)
    for req, nodes in enumerate(paths):
        path[req, : len(nodes)] = torch.tensor(nodes, dtype=torch.int32)
    folded = [layer.folded(block_size if by_prefix else 64) for layer in layers]
    if not by_prefix:
        folded = [each._replace(blocks=layer.rows.columns) for each, layer in zip(folded, layers)]
    fold_states(
        FoldTable.build(folded, by_prefix=by_prefix),
        first.kept,
        first.rows.query_start_loc,
        path.to(DEVICE),
        torch.tensor([len(nodes) for nodes in paths], dtype=torch.int32, device=DEVICE),
        torch.full((len(paths),), 40, dtype=torch.int32, device=DEVICE),
        num_reqs=len(paths),
    )


def stock_chain(given: Kept, lines: list[int], states: torch.Tensor, chain: RecurrentRows) -> None:
    """Continue states, which change, by vLLM's kernel over rows of the batch as one chain."""
    inputs, gates = given.inputs.rows[lines], of_rows(given.gates, lines)
    Rule(given.heads).stock(inputs, gates, states, chain)


def check_folded_bits(layers: Sequence[Kept], *, by_prefix: bool) -> None:
    """Fold paths that are scattered or short; their states have the bits of vLLM's chains."""
    rows = layers[0].rows
    deep = [deepest(rows, first, size) for first, size in ((0, 12), (12, 9))]
    assert all(path != list(range(len(path))) for path in deep)
    paths = [*deep, [0]]
    for layer in layers:
        chunk(layer)
    # The last request's states were written in the pass.
    layers[0].kept.firsts[24] = -1
    befores = [layer.states.clone() for layer in layers]
    fold(layers, [*paths, [0]], by_prefix=by_prefix, block_size=4)
    for layer, before in zip(layers, befores):
        changed = torch.zeros(len(before), dtype=torch.bool)
        for req, (first, path) in enumerate(zip((0, 12, 21), paths)):
            theirs, lines = before.clone(), [first + node for node in path]
            stock_chain(layer, lines, theirs, alone(rows, req, len(path)))
            columns = rows.columns[req].tolist()
            # Requests have 40 tokens, their rows included.
            length = 40 - int(rows.query_start_loc[req + 1] - rows.query_start_loc[req])
            for d in range(len(path)):
                if d == len(path) - 1 or (by_prefix and (length + d + 1) % 4 == 0):
                    assert torch.equal(layer.states[columns[d]], theirs[columns[d]])
                    assert not torch.equal(layer.states[columns[d]], before[columns[d]])
                    changed[columns[d]] = True
        assert torch.equal(layer.states[~changed], before[~changed])
