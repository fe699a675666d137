"""The query of kernels that take no e4m3 numbers, where vLLM's backends ask for an e4m3 query."""

from __future__ import annotations

import torch


def plain_query(query: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert an e4m3 query.

    Args:
        query: e4m3 ``[num_tokens, num_heads, head_size]``.
        scale: float32, one element; multiplies the query.
        dtype: dtype of the result, which is that of the output.

    Returns:
        The query times its scale, ``[num_tokens, num_heads, head_size]``. The product is computed
        in `dtype`.
    """
    return query.to(dtype) * scale.to(dtype)
