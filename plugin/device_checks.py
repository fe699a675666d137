"""What a tree asks of the device, refused in the frontend where the device can't do it.

The frontend must not initialise CUDA: vLLM's platform knows the compute capability from NVML.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_graft.config import EagleConfig, flag


def head_dtype(eagle: EagleConfig, vllm_config: Any) -> Iterator[str]:
    """An output head in FP8 needs products of FP8 numbers on a GPU; a CPU has emulated ones."""
    from vllm.platforms import current_platform

    if eagle.head_dtype != "fp8" or current_platform.device_type != "cuda":
        return
    needs = f"{flag('eagle', 'head_dtype')} is 'fp8', which needs an NVIDIA GPU of compute"
    capability = current_platform.get_device_capability()
    if not current_platform.is_cuda():
        yield f"{needs} capability 8.9 or later: set it to 'auto'."
    elif capability is not None and (capability.major, capability.minor) < (8, 9):
        found = capability.as_version_str()
        yield f"{needs} capability 8.9 or later, but this one has {found}: set it to 'auto'."


def attention(eagle: EagleConfig, vllm_config: Any) -> Iterator[str]:
    """FlashAttention 3 over the keys before the tree is what vLLM itself has of it."""
    if eagle.attention == "flash" and (reason := _no_flash(vllm_config.attention_config)):
        yield (
            f"{flag('eagle', 'attention')} is 'flash', but {reason}: set it to 'auto' or 'triton'."
        )


def _no_flash(config: Any) -> str | None:
    """Why no layer can have FlashAttention 3, as far as that is known without a layer."""
    from vllm import envs
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return f"the platform {current_platform.device_type} has no FlashAttention 3"
    backend = getattr(config.backend, "name", None)
    if backend not in (None, "FLASH_ATTN"):
        return f"the attention backend is {backend}, not FLASH_ATTN"
    if config.flash_attn_version not in (None, 3):
        return f"attention_config.flash_attn_version is {config.flash_attn_version}, not 3"
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT is set, and splits depend on the batch"
    capability = current_platform.get_device_capability()
    # As in vllm_flash_attn/flash_attn_interface.py.
    if capability is not None and capability.major != 9:
        found = capability.as_version_str()
        return f"FlashAttention 3 is for compute capability 9, and this device has {found}"
    return None
