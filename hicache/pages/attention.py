"""The attention that a rank really runs, which decides how K/V lies in a block.

Flags say what was asked for. What runs may differ: trees on a CPU replace vLLM's attention after
the pools were made, and vLLM's own CPU kernels pack K by the machine's instruction set.
"""

from __future__ import annotations

from typing import Any


def attention_of(worker: Any) -> dict[str, list[str]]:
    """The layers of a rank by the attention that they run with. It runs in each worker.

    Args:
        worker: vLLM's worker, after the KV cache was registered.

    Returns:
        The names of layers, by the backend's class and the instruction set (only CPUs have one).
    """
    layers = worker.vllm_config.compilation_config.static_forward_context
    found: dict[str, list[str]] = {}
    for name, layer in sorted(layers.items()):
        if hasattr(layer, "get_attn_backend"):
            backend = layer.get_attn_backend()
            runs = f"{backend.__module__}.{backend.__qualname__} {getattr(layer, 'isa', '')}"
            found.setdefault(runs.strip(), []).append(name)
    return found
