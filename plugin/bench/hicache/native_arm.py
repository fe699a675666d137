"""Stand-ins for vLLM's own offloading where it cannot run as it is.

Both keep its scheduler, manager and policies. :class:`PrivateMemorySpec` keeps its copies as well
and only takes host memory of the process where ``/dev/shm`` is too small. :class:`CpuCopySpec`
copies with the CPU, as vLLM refuses that platform; it is for trying the benchmark out.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class PrivateMemorySpec(CPUOffloadingSpec):
    """vLLM's specification without the shared region."""

    def _uses_shared_region(self) -> bool:
        return False


class CpuCopyWorker(OffloadingWorker):
    """A worker that has copied the pages when a call returns."""

    def __init__(self, caches: CanonicalKVCaches, num_chunks: int) -> None:
        self._refs = caches.group_data_refs
        self._device = [entry.tensor for entry in caches.tensors]
        self._host = [
            torch.zeros((num_chunks, *tensor.shape[1:]), dtype=tensor.dtype)
            for tensor in self._device
        ]
        self._results: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy from device to host."""
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """Copy from host to device; since vLLM 0.33 loads within a step are expedited."""
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs since the last call."""
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Return at once, because nothing is in flight."""

    def _copy(self, job_id: int, blocks: Any, chunks: Any, store: bool) -> bool:
        start, moved, position = time.perf_counter(), 0, 0
        for refs, count in zip(self._refs, blocks.group_sizes):
            pairs = slice(position, position + count)
            position += count
            for block, chunk in zip(blocks.block_ids[pairs], chunks.chunk_ids[pairs]):
                for ref in refs:
                    on_device = self._device[ref.tensor_idx][int(block)]
                    on_host = self._host[ref.tensor_idx][int(chunk)]
                    source, target = (on_device, on_host) if store else (on_host, on_device)
                    target.copy_(source)
                    moved += ref.page_size_bytes
        self._results.append(TransferResult(job_id, True, moved, time.perf_counter() - start))
        return True


class CpuCopySpec(CPUOffloadingSpec):
    """vLLM's manager with :class:`CpuCopyWorker`."""

    _copier: CpuCopyWorker | None = None

    def _uses_shared_region(self) -> bool:
        return False

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the worker, which is built once."""
        if self._copier is None:
            self._copier = CpuCopyWorker(kv_caches, self.num_chunks)
        return self._copier
