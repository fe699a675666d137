"""Device memory whose contents sleep mode keeps."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from vllm.config import VllmConfig

TAG = "runtime"
"""vLLM's name for the memory that its allocator copies to the host at each level of sleep."""


def kept_memory(vllm_config: VllmConfig) -> AbstractContextManager[None]:
    """Allocate in memory that comes back from sleep mode as it was. vLLM loads a model in memory
    for weights, whose contents are lost at level 2 of ``--enable-sleep-mode``, and then loads the
    weights again. What a part allocates beside them has nobody to fill it again. Without vLLM's own
    allocator nothing changes."""
    from vllm.platforms import current_platform

    if not (current_platform.is_cuda_alike() and vllm_config.model_config.enable_cumem_allocator):
        return contextlib.nullcontext()
    from vllm.device_allocator import get_mem_allocator_instance

    pool: AbstractContextManager[None] = get_mem_allocator_instance().use_memory_pool(tag=TAG)
    return pool
