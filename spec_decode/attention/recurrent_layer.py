"""What the grafts of all recurrent layers share: their caches, and their metadata in a pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from vllm_graft.base.errors import ConfigError

if TYPE_CHECKING:
    import torch


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
