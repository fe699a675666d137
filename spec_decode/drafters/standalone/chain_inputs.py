"""What the captured passes of a draft model read from a step's batch, at fixed addresses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch


@dataclass
class ChainInputs:
    """The captured loop's stand-in for `InputBatch`.

    Attributes:
        seq_lens: int32 ``[max_reqs]``, tokens of each request without its rejected drafts; 0 in
            padding.
        num_rejected: int32 ``[max_reqs]``, zeros: `seq_lens` excludes rejected drafts already.
        idx_mapping: int64 ``[max_reqs]``, the speculator's own; -1 in padding.
        seq_lens_cpu_upper_bound: not read, as attention metadata was made at capture.
    """

    seq_lens: torch.Tensor
    num_rejected: torch.Tensor
    idx_mapping: torch.Tensor
    seq_lens_cpu_upper_bound: None = None

    @classmethod
    def allocate(cls, idx_mapping: torch.Tensor) -> ChainInputs:
        """Buffers for as many requests as `idx_mapping` has."""
        zeros = torch.zeros(idx_mapping.shape[0], dtype=torch.int32, device=idx_mapping.device)
        return cls(zeros, zeros.clone(), idx_mapping)

    def load(self, seq_lens: torch.Tensor, num_rejected: torch.Tensor, num_reqs: int) -> None:
        """Copy a step's lengths, ``[>= num_reqs]`` each; the rest becomes padding."""
        rows = slice(0, num_reqs)
        torch.sub(seq_lens[rows], num_rejected[rows], out=self.seq_lens[rows])
        self.seq_lens[num_reqs:].zero_()

    def rows(self, num_reqs: int) -> ChainInputs:
        """Views of the first `num_reqs` requests."""
        return ChainInputs(
            self.seq_lens[:num_reqs], self.num_rejected[:num_reqs], self.idx_mapping[:num_reqs]
        )


@dataclass
class ExtendInputs:
    """The captured first pass's stand-in for `InputBatch`: each request has `width` rows.

    Attributes:
        width: rows per request, one more than its drafts.
        num_reqs: requests, padding included.
        input_ids: int32 ``[max_reqs * width]``.
        positions: int64 ``[max_reqs * width]``.
        query_start_loc: int32 ``[max_reqs + 1]``, multiples of `width`.
        query_start_loc_np: the same on the host.
        seq_lens: int32 ``[max_reqs]``, tokens of each request, rejected drafts included; `width`
            in padding, so that its rows have keys to attend to.
        num_rejected: int32 ``[max_reqs]``; 0 in padding.
        last_sampled: int32 ``[max_reqs]`` by request state. Memory holds one more element before
            the first, because padding has index -1.
        idx_mapping: int64 ``[max_reqs]``, the speculator's own; -1 in padding.
        seq_lens_cpu_upper_bound: not read, as attention metadata was made at capture.
    """

    width: int
    num_reqs: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    query_start_loc: torch.Tensor
    query_start_loc_np: np.ndarray
    seq_lens: torch.Tensor
    num_rejected: torch.Tensor
    last_sampled: torch.Tensor
    idx_mapping: torch.Tensor
    seq_lens_cpu_upper_bound: None = None

    @classmethod
    def allocate(cls, idx_mapping: torch.Tensor, width: int) -> ExtendInputs:
        """Buffers for as many requests as `idx_mapping` has."""
        num_reqs, device = idx_mapping.shape[0], idx_mapping.device
        starts = np.arange(num_reqs + 1, dtype=np.int32) * width

        def zeros(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            width,
            num_reqs,
            input_ids=zeros(num_reqs * width),
            positions=zeros(num_reqs * width, torch.int64),
            query_start_loc=torch.tensor(starts, device=device),
            query_start_loc_np=starts,
            seq_lens=zeros(num_reqs) + width,
            num_rejected=zeros(num_reqs),
            last_sampled=zeros(num_reqs + 1)[1:],
            idx_mapping=idx_mapping,
        )

    @property
    def num_tokens(self) -> int:
        return self.num_reqs * self.width

    def fits(self, batch: InputBatch) -> bool:
        """Whether every request of a batch has `width` rows."""
        return batch.num_tokens == batch.num_reqs * self.width and bool(
            (batch.num_scheduled_tokens == self.width).all()
        )

    def load(
        self, batch: InputBatch, num_rejected: torch.Tensor, last_sampled: torch.Tensor
    ) -> None:
        """Copy a batch that `fits`; the rest becomes padding.

        Args:
            batch: the target's batch.
            num_rejected: ``[>= num_reqs]`` integers.
            last_sampled: ``[max_reqs]`` or ``[max_reqs, 1]`` integers by request state.
        """
        num_reqs, num_tokens = batch.num_reqs, batch.num_tokens
        self.input_ids[:num_tokens].copy_(batch.input_ids[:num_tokens])
        self.positions[:num_tokens].copy_(batch.positions[:num_tokens])
        self.seq_lens[:num_reqs].copy_(batch.seq_lens[:num_reqs])
        self.seq_lens[num_reqs:].fill_(self.width)
        self.num_rejected[:num_reqs].copy_(num_rejected[:num_reqs])
        self.num_rejected[num_reqs:].zero_()
        self.last_sampled.copy_(last_sampled.flatten())

    def rows(self, num_reqs: int) -> ExtendInputs:
        """Views of the first `num_reqs` requests."""
        rows = num_reqs * self.width
        return replace(
            self,
            num_reqs=num_reqs,
            input_ids=self.input_ids[:rows],
            positions=self.positions[:rows],
            query_start_loc=self.query_start_loc[: num_reqs + 1],
            query_start_loc_np=self.query_start_loc_np[: num_reqs + 1],
            seq_lens=self.seq_lens[:num_reqs],
            num_rejected=self.num_rejected[:num_reqs],
            idx_mapping=self.idx_mapping[:num_reqs],
        )
