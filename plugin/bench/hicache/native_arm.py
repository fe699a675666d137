"""vLLM's own offloading where ``/dev/shm`` is too small for its host memory."""

from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class PrivateMemorySpec(CPUOffloadingSpec):
    """vLLM's specification, with host memory of the process in the place of the shared region."""

    def _uses_shared_region(self) -> bool:
        return False
