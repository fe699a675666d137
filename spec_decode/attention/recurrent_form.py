"""Whether a pass over trees writes a recurrent state per row, or keeps the rows' inputs instead.

A state of the gated delta rule is large: 2 MiB a layer in Qwen3-Next, against 16 KiB of a row's
inputs. A pass that writes states reads one state and writes as many as there are rows, and reads a
parent's again where it is not the row before. A pass that keeps inputs reads one state; when a path
is accepted, its state is read and one is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_graft.spec_decode.kernels.recurrence.kept_rows import MAX_ROWS
from vllm_graft.spec_decode.trees.recurrent_inputs import KeptRows, LayerInputs

if TYPE_CHECKING:
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

    from vllm_graft.spec_decode.verification.context import TreeContext

_LEAST_ROWS = 4
"""Rows of a request from which on inputs are kept: states would be moved five times and more, in
place of three times."""


def allocate_inputs(layer: Any, context: TreeContext) -> LayerInputs | None:
    """Memory for the inputs of a layer with the gated delta rule; None if states are written.

    What all layers share is allocated with the first one.
    """
    if context.recurrent_form == "states":
        return None
    weight = layer.conv1d.weight
    max_reqs, width = context.path.shape
    max_tokens = len(context.rows.row_parents)
    max_rows = min(max_tokens, max_reqs * width)
    if context.kept is None:
        context.kept = KeptRows.allocate(max_tokens, max_rows, weight.device)
    features, heads = weight.shape[0], layer.A_log.shape[0]
    inputs = LayerInputs.allocate(max_rows, features, heads, weight.dtype, weight.device)
    context.kept_bytes += inputs.nbytes
    return inputs


def most_rows(metadata: GDNAttentionMetadata) -> int:
    """Rows that a verified request of the batch has at most, by what the host knows."""
    uniform = metadata.uniform_spec_sequence_length
    assert metadata.spec_state_indices_tensor is not None
    return uniform or int(metadata.spec_state_indices_tensor.shape[1])


def keeps_inputs(metadata: GDNAttentionMetadata, kept: KeptRows, context: TreeContext) -> bool:
    """Whether inputs of the verified rows are kept, by host values alone.

    A graph is captured in the form that its number of rows has.

    Args:
        metadata: of a batch with verified requests.
        kept: bounds the rows.
        context: has the form that was asked for.
    """
    rows, requests = metadata.num_spec_decode_tokens, metadata.num_spec_decodes
    if max(rows, metadata.num_actual_tokens if _alone(metadata) else 0) > kept.max_rows:
        return False
    if most_rows(metadata) > MAX_ROWS or rows <= requests:
        return False
    return context.recurrent_form == "inputs" or rows >= _LEAST_ROWS * requests


def _alone(metadata: GDNAttentionMetadata) -> bool:
    return not metadata.num_prefills and not metadata.num_decodes
