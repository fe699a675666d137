"""What of vLLM's tree attention stands over."""

KV_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")
"""Formats of K/V. The others pack scales or smaller numbers between the values, or are no e4m3."""

BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN")
"""Backends whose K/V cache is ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``."""

LATENT_BACKENDS = ("TRITON_MLA", "FLASH_ATTN_MLA", "FLASHMLA", "CPU_MLA")
"""Backends of MLA whose cache is ``[num_blocks, block_size, rank + rope]``, a latent per token."""
