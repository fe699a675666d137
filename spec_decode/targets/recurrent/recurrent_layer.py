"""Grafts trees onto recurrent layers: what the grafts of all kinds share. A graft stands before a
layer's convolution and recurrence and lets each verified row continue its parent. All other rows
are computed by the layer itself, as a batch of their own."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.targets.recurrent.kernels.chunk import tree_chunk
from vllm_graft.spec_decode.targets.recurrent.kernels.gates import (
    MAX_ROWS,
    Decay,
    Gates,
    KeptRows,
    LayerInputs,
    RecurrentRows,
    keep_rows,
    numbers_of,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrence import tree_conv, tree_recurrence
from vllm_graft.spec_decode.verification.context import TreeContext

_LEAST_ROWS = 4
"""Rows of a request from which on inputs are kept: states, of 2 MiB a layer in Qwen3-Next against
16 KiB of a row's inputs, would be moved five times and more, in place of three times."""


def allocate_inputs(
    weight: torch.Tensor,
    gates: tuple[int, int],
    context: TreeContext,
    dtype: torch.dtype | None = None,
) -> LayerInputs:
    """Memory for the inputs of a layer with a convolution's weight ``[features, ...]``. What all
    layers share is allocated with the first one. `gates` are the numbers per head that a row's
    gates are, and heads; `dtype` is that of what is behind the convolution, None for the
    weight's."""
    max_reqs, width = context.path.shape
    max_tokens = len(context.rows.row_parents)
    max_rows = min(max_tokens, max_reqs * width)
    if context.kept is None:
        context.kept = KeptRows.allocate(max_tokens, max_rows, weight.device)
    inputs = LayerInputs.allocate(
        max_rows, weight.shape[0], gates, dtype or weight.dtype, weight.device
    )
    context.kept_bytes += inputs.nbytes
    return inputs


class Batch(NamedTuple):
    """Rows of a pass that drafts are verified in, as the host knows them. `requests` and `padded`
    (rows) include a graph's padding; `most` is of one request."""

    rows: int
    requests: int
    most: int
    padded: int


def keeps_inputs(batch: Batch, context: TreeContext) -> bool:
    """Whether the rows' inputs are kept, by host values alone: a graph is captured in one form."""
    kept = context.kept
    if kept is None or max(batch.rows, batch.padded) > kept.max_rows:
        return False
    if batch.most > MAX_ROWS or batch.rows <= batch.requests:
        return False
    return context.recurrent_form == "inputs" or batch.rows >= _LEAST_ROWS * batch.requests


def keep_inputs(
    batch: Batch, rows: RecurrentRows, batch_rows: torch.Tensor | None, context: TreeContext
) -> int:
    """Note that a pass keeps its rows' inputs, if it does; `batch_rows` is as of `keep_rows`. The
    most rows of a request are returned, or 0 where the pass writes states."""
    if context.kept is None or not keeps_inputs(batch, context):
        return 0
    keep_rows(context.kept, rows, batch_rows, batch.most)
    return batch.most


class Parted(NamedTuple):
    """The rows of requests that drafts are verified of, and the rest of a batch. `others`: vLLM's
    metadata of the rest alone; None if there is none. `max_rows`: most rows of a request, if their
    inputs are kept; 0 if their states are written."""

    rows: RecurrentRows
    others: Any
    max_rows: int = 0


@dataclass
class TreeRecurrence:
    """In place of a layer's pass (`stock`): each verified row continues its parent's state. A pass
    either writes each row's state to the row's column, or writes no state and keeps the rows'
    `inputs`, by which the accepted path's state is made afterwards. A kind of layer is a subclass,
    called in place of the layer's method `PASS`."""

    PASS: ClassVar[str]
    """Name of the layer's method."""

    DECAY: ClassVar[Decay]
    """The kind of decay of its states."""

    SEAMS: ClassVar[tuple[str, ...]] = ("recurrent",)
    """Parts of the ledger that it relies on."""

    layer: Any
    context: TreeContext
    stock: Callable[..., Any]
    inputs: LayerInputs | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def graft(cls, name: str, layer: Any, context: TreeContext) -> None:
        """Make the layer `name` compute tree rows besides what it does already, or refuse it."""
        cls.prepare(name, layer)
        require_columns(name, layer)
        trees = cls(layer, context, getattr(layer, cls.PASS))
        if context.recurrent_form != "states":
            gates = numbers_of(cls.DECAY, trees.key_size), trees.heads
            trees.inputs = allocate_inputs(layer.conv1d.weight, gates, context, trees.dtype)
        layer.tree_recurrence = trees
        setattr(layer, cls.PASS, trees.installed())

    @classmethod
    def prepare(cls, name: str, layer: Any) -> None:
        """Refuse the layer, or have it take the pass that is replaced."""

    def installed(self) -> Callable[..., Any]:
        return self

    @property
    def heads(self) -> int:
        return len(self.layer.A_log)

    @property
    def key_size(self) -> int:
        """Columns of a state, where decays are by key; else 0, as the gates have no such size."""
        return 0

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of what is behind the convolution; None for that of its weight."""
        return None

    @property
    def groups(self) -> int:
        """Heads of queries and keys of this rank, or groups of ``B`` and ``C``."""
        raise NotImplementedError

    @property
    def silu(self) -> bool:
        """Whether SiLU follows the convolution; otherwise there is no activation."""
        return self.layer.activation in ("silu", "swish")

    def fold_gates(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Rates and biases by which states are continued later, as of `FoldedLayer`."""
        return self.layer.A_log, self.layer.dt_bias

    def recur(self, inputs: torch.Tensor, gates: Gates, part: Parted, out: torch.Tensor) -> None:
        """Send `inputs` ``[num_rows, features]`` through convolution and recurrence. `out`
        ``[num_rows, heads, V]`` receives the result."""
        layer, rows = self.layer, part.rows
        kept = self.inputs if part.max_rows else None
        mixed = tree_conv(
            inputs, windows_of(layer), layer.conv1d.weight.flatten(1), layer.conv1d.bias, rows,
            silu=self.silu, outputs=None if kept is None else kept.rows[: len(inputs)],
        )  # fmt: skip
        states, groups = layer.kv_cache[1], self.groups
        if kept is None:
            tree_recurrence(mixed, gates, states, rows, out, groups=groups)
            return
        noted = self.context.kept
        assert noted is not None
        tree_chunk(
            mixed, gates, states, rows, noted, kept.gates, out, groups=groups,
            max_rows=part.max_rows,
        )  # fmt: skip


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
    """Refuse a layer that does not keep a state per row."""
    mode = layer.cache_config.mamba_cache_mode
    if mode not in ("none", "align"):
        raise ConfigError(
            f"--mamba-cache-mode is {mode}, which --additional-config.graft.tree does not know how "
            f"to keep in step with trees in layer {name}: set it to align or none, or set "
            f"--additional-config.graft.tree.topk to 1 for a chain"
        )
