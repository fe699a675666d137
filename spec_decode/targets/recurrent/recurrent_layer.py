"""What the grafts of all recurrent layers share: their caches, and their metadata in a pass."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.targets.recurrent.kernels.convolution import tree_conv
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_rows import RecurrentRows
from vllm_graft.spec_decode.targets.recurrent.recurrent_form import Batch, keep_inputs

if TYPE_CHECKING:
    import torch
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

    from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_inputs import LayerInputs
    from vllm_graft.spec_decode.verification.context import TreeContext


class DeltaPart(NamedTuple):
    """The two parts of a batch of layers with a delta rule.

    Attributes:
        rows: the rows of requests that drafts are verified of.
        others: vLLM's metadata of the rest alone; None if there is none.
        max_rows: most rows of a request, if their inputs are kept; 0 if their states are written.
    """

    rows: RecurrentRows
    others: GDNAttentionMetadata | None
    max_rows: int = 0


def delta_part(metadata: GDNAttentionMetadata, parents: torch.Tensor) -> DeltaPart:
    """Where trees are, by host values alone.

    Args:
        metadata: of a batch with verified requests.
        parents: i32 ``[max_tokens]``, the row that each row of the batch continues.
    """
    count = metadata.num_spec_decodes
    columns, starts = metadata.spec_state_indices_tensor, metadata.spec_query_start_loc
    accepted = metadata.num_accepted_tokens
    assert columns is not None
    assert starts is not None
    assert accepted is not None
    if not metadata.num_prefills and not metadata.num_decodes:
        # A graph holds this form: rows are in the batch's order, padding is behind them.
        return DeltaPart(RecurrentRows(parents, starts, columns, accepted, count), None)
    assert metadata.spec_token_indx is not None
    own = parents.index_select(0, metadata.spec_token_indx)
    others = dataclasses.replace(
        metadata,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=metadata.num_prefill_tokens + metadata.num_decode_tokens,
        spec_query_start_loc=None,
        spec_state_indices_tensor=None,
        spec_sequence_masks=None,
        spec_sequence_masks_cpu=None,
        spec_token_indx=None,
        non_spec_token_indx=None,
        num_accepted_tokens=None,
        uniform_spec_sequence_length=None,
    )
    return DeltaPart(RecurrentRows(own, starts, columns, accepted, count), others)


def kept_part(metadata: GDNAttentionMetadata, context: TreeContext) -> DeltaPart:
    """Where trees are, and what is kept of them: to be noted once per pass.

    Args:
        metadata: of a batch with verified requests.
        context: what the tree parts of the worker share.
    """
    part = delta_part(metadata, context.rows.row_parents)
    leads = part.others is None
    batch = Batch(
        rows=metadata.num_spec_decode_tokens,
        requests=metadata.num_spec_decodes,
        most=metadata.uniform_spec_sequence_length or part.rows.columns.shape[1],
        padded=metadata.num_actual_tokens if leads else 0,
    )
    places = None if leads else metadata.spec_token_indx
    return part._replace(max_rows=keep_inputs(batch, part.rows, places, context))


def convolved(
    layer: Any,
    inputs: torch.Tensor,
    weights: torch.Tensor,
    rows: RecurrentRows,
    kept: LayerInputs | None,
    *,
    silu: bool,
) -> torch.Tensor:
    """What is behind a layer's convolution of a pass's rows.

    Args:
        layer: has the windows and the bias.
        inputs: ``[num_rows, features]``, before it.
        weights: ``[features, taps]``.
        rows: which row continues which.
        kept: where the result is kept; None to allocate it.
        silu: whether the activation is SiLU; otherwise there is none.
    """
    outputs = None if kept is None else kept.rows[: len(inputs)]
    bias = layer.conv1d.bias
    return tree_conv(inputs, windows_of(layer), weights, bias, rows, silu=silu, outputs=outputs)


def windows_of(layer: Any) -> torch.Tensor:
    """A layer's windows of inputs, ``[num_blocks, dim, slots]``, in either layout of vLLM's."""
    windows: torch.Tensor = layer.kv_cache[0]
    return windows if is_conv_state_dim_first() else windows.transpose(-1, -2)


def metadata_of(layer: Any) -> Any:
    """The layer's metadata in the pass under way; None in a run without attention."""
    known = get_forward_context().attn_metadata
    return known.get(layer.prefix) if isinstance(known, dict) else None


@contextlib.contextmanager
def told(layer: Any, metadata: Any) -> Iterator[None]:
    """Let the layer find this metadata in place of its own."""
    known = get_forward_context().attn_metadata
    assert isinstance(known, dict)
    stock = known[layer.prefix]
    known[layer.prefix] = metadata
    try:
        yield
    finally:
        known[layer.prefix] = stock


def require_columns(name: str, layer: Any) -> None:
    """Refuse a layer that does not keep a state per row.

    Raises:
        ConfigError: if vLLM keeps the states of the layer `name` in another way.
    """
    mode = layer.cache_config.mamba_cache_mode
    if mode not in ("none", "align"):
        raise ConfigError(
            f"--mamba-cache-mode is {mode}, which --additional-config.graft.tree does not know how "
            f"to keep in step with trees in layer {name}: set it to align or none, or set "
            f"--additional-config.graft.tree.topk to 1 for a chain"
        )
