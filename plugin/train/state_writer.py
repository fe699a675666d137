"""A KV connector that writes the hidden states of finished requests, on any device."""

from __future__ import annotations

import os
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as stock
from vllm.logger import init_logger

logger = init_logger(__name__)


class StateWriter(stock.ExampleHiddenStatesConnector):
    """vLLM's own for its method ``extract_hidden_states``, without what takes a GPU.

    A file appears once it is whole. vLLM's copies by a CUDA stream, tells of a file at once, and
    leaves half of one behind where it is killed.
    """

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Take the states of requests that have ended out of the cache, and let go of them."""
        metadata: Any = self._get_connector_metadata() if self.has_connector_metadata() else None
        done = set()
        for pending in getattr(metadata, "pending_saves", ()):
            if self._is_tp_rank_zero:
                states = self._states(pending.block_ids, len(pending.token_ids))
                tensors = {"hidden_states": states, "token_ids": pending.token_ids}
                written = self._executor.submit(_write, tensors, pending.filename)
                written.add_done_callback(partial(_complain, pending.filename))
                done.add(pending.req_id)
        return done or None, None

    def _states(self, block_ids: list[int], count: int) -> torch.Tensor:
        """``[count, layers, hidden]`` on the host."""
        cache = self._kv_cache
        assert cache is not None
        blocks = torch.tensor(block_ids, device=cache.device)[:, None] * self._block_size
        slots = (blocks + torch.arange(self._block_size, device=cache.device)).flatten()
        return stock.extract_from_kv_cache(cache, slots[:count], count).cpu().contiguous()


def _write(tensors: dict[str, torch.Tensor], filename: str) -> None:
    part = f"{filename}.part"
    save_file(tensors, part)
    os.replace(part, filename)


def _complain(filename: str, written: Future[None]) -> None:
    if error := written.exception():
        logger.error("vllm-graft train: %s could not be written: %s", filename, error)
