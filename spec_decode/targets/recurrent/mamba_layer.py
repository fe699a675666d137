"""Grafts trees onto layers of Mamba-2, in Nemotron-H, Falcon-H1 and Granite 4.0-H.

Verified rows lead such a layer's batch, prompts follow.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.targets.recurrent.kernels.gates import Decay, SelectiveGates
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_rows import RecurrentRows
from vllm_graft.spec_decode.targets.recurrent.recurrent_layer import (
    Batch,
    Parted,
    TreeRecurrence,
    keep_inputs,
    metadata_of,
    told,
)

if TYPE_CHECKING:
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata


@dataclass
class TreeSelectiveState(TreeRecurrence):
    """In place of a layer's ``conv_ssm_forward``."""

    PASS = "conv_ssm_forward"
    DECAY = Decay.SELECTIVE

    def __call__(self, projected_states: torch.Tensor, output: torch.Tensor) -> Any:
        """Compute a batch into `output` ``[num_tokens, heads * P]``.

        `projected_states` is ``[num_tokens, gate + inputs, B and C + heads]``.
        """
        metadata = metadata_of(self.layer)
        if metadata is None or not metadata.num_decodes or metadata.num_accepted_tokens is None:
            return self.stock(projected_states, output)
        count = metadata.num_decode_tokens
        part = self.context.once(metadata, self._part)
        self._verify(projected_states[:count], part, output[:count])
        if part.others is not None:
            with told(self.layer, part.others):
                self.stock(projected_states[count:], output[count:])
        return None

    def _verify(self, projected: torch.Tensor, part: Parted, output: torch.Tensor) -> None:
        layer = self.layer
        inputs, steps = projected[:, layer.tped_intermediate_size :].split(
            [layer.tped_conv_size, layer.tped_dt_size], dim=-1
        )
        # Rows of no request, such as a graph's padding, must not be NaN.
        output.zero_()
        gates = SelectiveGates(steps, layer.A, layer.dt_bias, layer.D)
        self.recur(inputs, gates, part, output.unflatten(1, (layer.tped_dt_size, layer.head_dim)))

    def _part(self, metadata: Mamba2AttentionMetadata) -> Parted:
        columns, starts = metadata.state_indices_tensor_d, metadata.query_start_loc_d
        accepted = metadata.num_accepted_tokens
        assert columns is not None
        assert starts is not None
        assert accepted is not None
        # They lead the batch, so that its rows are theirs.
        parents = self.context.rows.row_parents
        rows = RecurrentRows(parents, starts, columns, accepted, metadata.num_decodes)
        count, others = metadata.num_decode_tokens, None
        if metadata.num_prefills:
            others = dataclasses.replace(metadata, num_decodes=0, num_decode_tokens=0)
        batch = Batch(count, metadata.num_decodes, columns.shape[1], padded=count)
        return Parted(rows, others, keep_inputs(batch, rows, None, self.context))

    @classmethod
    def prepare(cls, name: str, layer: Any) -> None:
        """Refuse states that are kept as inputs of a chain."""
        if layer.use_replayssm:
            raise ConfigError(
                f"--use-replayssm keeps no state per row in layer {name}, which "
                f"--additional-config.graft.tree needs: drop it, or set "
                f"--additional-config.graft.tree.topk to 1 for a chain"
            )

    @property
    def heads(self) -> int:
        return len(self.layer.A)

    @property
    def groups(self) -> int:
        return int(self.layer.n_groups // self.layer.tp_size)

    def fold_gates(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer.A, self.layer.dt_bias
