"""How many nodes of a tree a preset lets vLLM hold recurrent states for."""

from __future__ import annotations

from typing import Any

from vllm_graft.spec_decode.config.target_config import target_of

MOST, FEW = 15, 7
SHARE = 4
"""States of a tree may take one part in so many of a GPU's memory. The weights and the K/V of the
same requests need the rest."""


def node_bytes(nodes: int, vllm_config: Any) -> int:
    """Bytes that vLLM holds on one rank for one row of one request with the gated delta rule.

    Args:
        nodes: of a tree. A row's window of inputs has room for all of them.
        vllm_config: its target's recurrent layers all have the gated delta rule.
    """
    model, cache = target_of(vllm_config), vllm_config.cache_config
    text, ranks = model.hf_text_config, vllm_config.parallel_config.tensor_parallel_size
    values = text.linear_num_value_heads * text.linear_value_head_dim
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    window = (2 * keys + values) * (text.linear_conv_kernel_dim - 1 + nodes)
    of_windows = _item_size(cache.mamba_cache_dtype, model.dtype)
    of_states = _item_size(cache.mamba_ssm_cache_dtype, cache.mamba_cache_dtype, model.dtype)
    layer = window * of_windows + values * text.linear_key_head_dim * of_states
    return int(list(text.layer_types).count("linear_attention") * layer) // int(ranks)


def nodes_with_states(vllm_config: Any) -> tuple[int, str]:
    """How many nodes a preset's tree gets at most, and why. 0 if not even a small one has room.

    All of it is known before the model is loaded.

    Args:
        vllm_config: as for `node_bytes`.
    """
    from vllm.platforms import current_platform

    requests = vllm_config.scheduler_config.max_num_seqs
    memory = current_platform.get_device_total_memory()
    each = node_bytes(MOST, vllm_config)
    why = f"vLLM holds {each / 1e6:.0f} MB of recurrent states per node and request."

    def too_much(nodes: int) -> str:
        room, of_request = memory // SHARE, (1 + nodes) * each
        if of_request * requests <= room:
            return ""
        return (
            f"{why} With {nodes} nodes and --max-num-seqs {requests} that is "
            f"{of_request * requests / 1e9:.0f} GB, more than a quarter of the device's "
            f"{memory / 1e9:.0f} GB: --max-num-seqs {room // of_request} has room for them."
        )

    if not (crowded := too_much(MOST)):
        return MOST, why
    if none := too_much(FEW):
        return 0, none
    return FEW, crowded


def _item_size(*dtypes: Any) -> int:
    """Bytes of a number of the first dtype that is not ``auto``."""
    import torch

    given = next(dtype for dtype in dtypes if dtype != "auto")
    dtype: torch.dtype = getattr(torch, str(given).removeprefix("torch."))
    return int(dtype.itemsize)
