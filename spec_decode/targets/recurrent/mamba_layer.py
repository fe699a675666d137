"""Grafts trees onto layers of Mamba-2, in Nemotron-H, Falcon-H1 and Granite 4.0-H.

vLLM sends rows of requests that it verifies drafts of, which lead a batch, through a convolution
and a recurrence of their own, each row behind the row before. We stand before both, in
``conv_ssm_forward``, and let each row continue its parent. Prompts are computed by the layer
itself, as a batch of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_rows import RecurrentRows
from vllm_graft.spec_decode.targets.recurrent.kernels.selective_chunk import tree_selective_chunk
from vllm_graft.spec_decode.targets.recurrent.kernels.selective_state import (
    SelectiveGates,
    tree_selective_update,
)
from vllm_graft.spec_decode.targets.recurrent.recurrent_form import (
    Batch,
    allocate_inputs,
    keep_inputs,
)
from vllm_graft.spec_decode.targets.recurrent.recurrent_layer import (
    convolved,
    metadata_of,
    require_columns,
    told,
)

if TYPE_CHECKING:
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata

    from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_inputs import LayerInputs
    from vllm_graft.spec_decode.verification.context import TreeContext


class SelectivePart(NamedTuple):
    """The rows of a batch that lead it and that drafts are verified in.

    Attributes:
        rows: which row continues which.
        max_rows: most rows of a request, if their inputs are kept; 0 if their states are written.
    """

    rows: RecurrentRows
    max_rows: int = 0


@dataclass
class TreeSelectiveState:
    """In place of a layer's ``conv_ssm_forward``: a verified row continues its parent's state.

    Attributes:
        layer: the layer.
        context: what the tree parts of the worker share.
        stock: the layer's own ``conv_ssm_forward``.
        inputs: keeps the rows' inputs; None if every pass writes states.
    """

    layer: MambaMixer2
    context: TreeContext
    stock: Callable[..., Any]
    inputs: LayerInputs | None = None

    def __call__(self, projected_states: torch.Tensor, output: torch.Tensor) -> Any:
        """Compute a batch into `output` ``[num_tokens, heads * P]``.

        Args:
            projected_states: ``[num_tokens, gate + inputs, B and C + heads]``.
            output: receives the result.
        """
        metadata = metadata_of(self.layer)
        if metadata is None or not metadata.num_decodes or metadata.num_accepted_tokens is None:
            return self.stock(projected_states, output)
        count = metadata.num_decode_tokens
        part = self.context.once(metadata, self._part)
        self._verify(projected_states[:count], part, output[:count])
        if metadata.num_prefills:
            others = dataclasses.replace(metadata, num_decodes=0, num_decode_tokens=0)
            with told(self.layer, others):
                self.stock(projected_states[count:], output[count:])
        return None

    def _verify(self, projected: torch.Tensor, part: SelectivePart, output: torch.Tensor) -> None:
        layer, rows = self.layer, part.rows
        kept = self.inputs if part.max_rows else None
        inputs, steps = projected[:, layer.tped_intermediate_size :].split(
            [layer.tped_conv_size, layer.tped_dt_size], dim=-1
        )
        silu = layer.activation in ("silu", "swish")
        mixed = convolved(layer, inputs, layer.conv_weights, rows, kept, silu=silu)
        # Rows of no request, such as a graph's padding, must not be NaN.
        output.zero_()
        gates = SelectiveGates(steps, layer.A, layer.dt_bias, layer.D)
        found = output.unflatten(1, (layer.tped_dt_size, layer.head_dim))
        states, groups = layer.kv_cache[1], layer.n_groups // layer.tp_size
        if kept is None:
            tree_selective_update(mixed, gates, states, rows, found, groups=groups)
            return
        assert self.context.kept is not None
        tree_selective_chunk(
            mixed,
            gates,
            states,
            rows,
            self.context.kept,
            kept.gates,
            found,
            groups=groups,
            max_rows=part.max_rows,
        )

    def _part(self, metadata: Mamba2AttentionMetadata) -> SelectivePart:
        """Where trees are, by host values alone. Layers of one metadata object share it."""
        columns, starts = metadata.state_indices_tensor_d, metadata.query_start_loc_d
        accepted = metadata.num_accepted_tokens
        assert columns is not None
        assert starts is not None
        assert accepted is not None
        # They lead the batch, so that its rows are theirs.
        parents = self.context.rows.row_parents
        rows = RecurrentRows(parents, starts, columns, accepted, metadata.num_decodes)
        count = metadata.num_decode_tokens
        batch = Batch(count, metadata.num_decodes, columns.shape[1], padded=count)
        return SelectivePart(rows, keep_inputs(batch, rows, None, self.context))


def graft_mamba(name: str, layer: MambaMixer2, context: TreeContext) -> None:
    """Make the layer `name` compute tree rows besides what it does already.

    Raises:
        ConfigError: if the layer keeps its states in another way than a column per row.
    """
    if layer.use_replayssm:
        raise ConfigError(
            f"--use-replayssm keeps no state per row in layer {name}, which "
            f"--additional-config.graft.tree needs: drop it, or set "
            f"--additional-config.graft.tree.topk to 1 for a chain"
        )
    require_columns(name, layer)
    inputs = None
    if context.recurrent_form != "states":
        inputs = allocate_inputs(layer.conv1d.weight, (1, layer.A.shape[0]), context)
    layer.conv_ssm_forward = TreeSelectiveState(layer, context, layer.conv_ssm_forward, inputs)
