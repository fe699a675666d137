"""Which targets have latents of MLA."""

from typing import Any

from vllm_graft.hooks.feature import Feature, if_model_has

LATENT_BACKENDS = ("TRITON_MLA", "FLASH_ATTN_MLA", "FLASHMLA", "CPU_MLA")
"""Backends of MLA whose cache is ``[num_blocks, block_size, rank + rope]``, a latent per token."""


def sparse_in(model: Any) -> str:
    """What a model has of sparse attention, as the words after "The target"; empty for none."""
    text = model.hf_text_config
    # DeepSeek V3.2, GLM-5 and others have an indexer; DeepSeek V4 compresses keys besides.
    # MiniMax M3 picks blocks of keys: the first key is vLLM's, the second transformers'.
    keys = ("compress_ratios", "sparse_attention_config", "index_topk_blocks")
    has = hasattr(text, "index_topk") or any(getattr(text, key, None) for key in keys)
    return "uses sparse attention" if has else ""


LATENT: tuple[Feature, ...] = (
    Feature(
        "MLA attention",
        "It caches latents instead of K and V.",
        in_model=if_model_has("use_mla", "uses MLA attention"),
    ),
    Feature(
        "sparse attention",
        "An indexer picks the keys of a row in the order of their slots, other branches among "
        "them.",
        in_model=sparse_in,
        in_layer=lambda layer: bool(getattr(layer.impl, "is_sparse", False)),
    ),
)
