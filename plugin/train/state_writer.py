"""A KV connector that writes the hidden states of finished requests, on any device."""

import os
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as stock


class StateWriter(stock.ExampleHiddenStatesConnector):
    """vLLM's own for its method ``extract_hidden_states``, which copies by a stream of CUDA; on
    other devices there is none. A file appears once it is whole."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Take the states of requests that have ended out of the cache, and let go of them."""
        cache = self._kv_cache
        if cache is None or cache.is_cuda:
            found: tuple[set[str] | None, set[str] | None] = super().get_finished(finished_req_ids)
            return found
        metadata: Any = self._get_connector_metadata() if self.has_connector_metadata() else None
        done = set()
        for pending in getattr(metadata, "pending_saves", ()):
            if self._is_tp_rank_zero:
                count = len(pending.token_ids)
                first = torch.tensor(pending.block_ids)[:, None] * self._block_size
                slots = (first + torch.arange(self._block_size)).flatten()
                states = stock.extract_from_kv_cache(cache, slots, count).contiguous()
                tensors = {"hidden_states": states, "token_ids": pending.token_ids}
                self._executor.submit(_write, tensors, pending.filename)
                done.add(pending.req_id)
        return done or None, None

    @staticmethod
    def _write_tensors(
        tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: int | None
    ) -> None:
        event.synchronize()
        _write(tensors, filename)


def _write(tensors: dict[str, torch.Tensor], filename: str) -> None:
    part = f"{filename}.part"
    save_file(tensors, part)
    os.replace(part, filename)
