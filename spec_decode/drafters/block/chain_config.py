"""The configuration that vLLM's speculator of blocks is built with, beside the engine's own."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from vllm_graft.base.options import without_section
from vllm_graft.spec_decode.config.tree_config import NAME

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def chain_config(vllm_config: VllmConfig, depth: int) -> VllmConfig:
    """What vLLM would have for chains of ``depth`` tokens, with ``graft.tree`` taken out.

    To the engine ``num_speculative_tokens`` is the nodes of a tree. To vLLM's speculator, and to
    the draft that it loads, it is the depth of a block. vLLM derives further configurations from
    what its speculator has, which validates again, sets sizes and calls the platform: none of that
    may reach the engine's objects, nor may our section make the depth a number of nodes.

    Args:
        vllm_config: the engine's, which is not changed. Layers are registered in both.
        depth: positions of a block that predict a token.
    """
    chain = copy.copy(vllm_config)
    chain.speculative_config = copy.copy(vllm_config.speculative_config)
    assert chain.speculative_config is not None
    chain.speculative_config.num_speculative_tokens = depth
    # A block costs the same at any number of nodes.
    chain.speculative_config.num_speculative_tokens_per_batch_size = None
    chain.compilation_config = copy.copy(vllm_config.compilation_config)
    chain.scheduler_config = copy.copy(vllm_config.scheduler_config)
    without_section(chain, NAME)
    return chain
