"""Exact verification of a draft tree: draw the target's token at every node, then walk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    get_max_chunk_logits,
)

from vllm_graft.spec_decode.kernels.walk import walk_tree

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    from vllm_graft.spec_decode.context import TreeContext


MAX_CHUNK_BYTES = 2**28
"""Of float32 logits at a time. vLLM's own limit, 1 GiB, is a chain's; torch's top-p sorts such a
chunk into values and 64-bit indices, so that a quarter of it stays under 1 GiB in all."""


class TreeRejectionSampler(RejectionSampler):
    """Emits, a request, the longest path of the tree that the target's own draws follow.

    Every emitted token is a draw of vLLM's sampler from the target given its prefix, with noise
    keyed by (seed, position). Step by step these are the very draws that are made without
    speculation, whatever the tree holds: it decides how many are made in one pass, never what
    they are. So the output distribution is the target's, also where drafts look at the noise.
    """

    def __init__(
        self,
        sampler: Sampler,
        config: SpeculativeConfig,
        device: torch.device,
        context: TreeContext,
    ) -> None:
        super().__init__(sampler, config, device)
        self.context = context
        # FlashInfer draws with noise of its own; drafts know that of vLLM's own sampler.
        sampler.use_flashinfer = False

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Verify a batch.

        Args:
            logits: ``[num_logits, vocab]``, root first, then the nodes, request after request.
            input_batch: the engine's batch.
            draft_logits: not used; drafts are chosen, not sampled.
            invalid_drafts: bool ``[num_logits]``, drafts that a grammar refused.
        """
        batch, sampler, context = input_batch, self.sampler, self.context
        num_nans = get_num_nans(logits) if sampler.compute_nans else None
        positions = batch.positions[batch.logits_indices]
        ids = batch.input_ids[batch.logits_indices]
        drawn, processed = self._draw(logits, batch, positions, ids)

        sampled = ids.new_zeros((batch.num_reqs, context.shape.num_nodes + 1), dtype=torch.int64)
        num_sampled = batch.seq_lens.new_ones(batch.num_reqs)
        prefill_len = sampler.req_states.prefill_len.gpu[batch.idx_mapping]
        walk_tree(
            drawn,
            ids if invalid_drafts is None else ids.masked_fill(invalid_drafts, -1),
            batch.cu_num_logits,
            batch.idx_mapping,
            context.tree,
            sampled,
            context.path,
            num_sampled,
            # Drafts behind an unfinished prompt are placeholders (a remote KV load pads so).
            root_in_prefill=positions[batch.cu_num_logits[:-1]] < prefill_len,
        )
        logprobs = self._logprobs(sampled, num_sampled, logits, processed, batch)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_sampled,
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            sampler.req_states.prefill_len.gpu,
        )
        assert context.step is not None
        context.step.num_sampled = num_sampled
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=logprobs,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _draw(
        self,
        logits: torch.Tensor,
        batch: InputBatch,
        positions: torch.Tensor,
        ids: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draw the target's token at every row, in chunks that bound the float32 copies.

        There are none where no request of a chunk changes its logits (greedy requests, and those
        of temperature 1 with neither top-k nor top-p): vLLM's sampler then reads the model's own
        logits once, and adds no noise at temperature 0.

        Returns the tokens int64 ``[num_logits]`` and, if logprobs of processed logits are
        wanted, these logits.
        """
        keep = self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES and self._wants_logprobs(
            batch
        )
        drawn, processed = [], []
        for first, last in _chunks(batch.cu_num_logits_np, _max_rows(logits.shape[1])):
            rows = slice(int(batch.cu_num_logits_np[first]), int(batch.cu_num_logits_np[last]))
            tokens, changed = self.sampler.sample(
                logits[rows],
                batch.expanded_idx_mapping[rows],
                batch.idx_mapping[first:last],
                batch.idx_mapping_np[first:last],
                positions[rows],
                ids[rows],
                batch.expanded_local_pos[rows],
                batch.seq_lens_cpu_upper_bound.numpy()[first:last],
                return_logprobs=keep,
            )
            drawn.append(tokens)
            if keep:
                processed.append(changed)
        return _join(drawn), _join(processed) if keep else None

    def _wants_logprobs(self, batch: InputBatch) -> bool:
        wanted = self.sampler.sampling_states.max_num_logprobs(batch.idx_mapping_np)
        return bool(wanted != NO_LOGPROBS)

    def _logprobs(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        logits: torch.Tensor,
        processed: torch.Tensor | None,
        batch: InputBatch,
    ) -> LogprobsTensors | None:
        """Logprobs along the accepted path: its rows are brought into a chain's order first."""
        if not self._wants_logprobs(batch):
            return None
        local = batch.expanded_local_pos
        request = torch.arange(batch.num_reqs, device=logits.device).repeat_interleave(
            batch.cu_num_logits.diff(), output_size=logits.shape[0]
        )
        accepted = local < num_sampled[request]
        node = torch.where(accepted, self.context.path[request, local.long()], local)
        source = logits if processed is None else processed
        return self._get_logprobs_tensors(
            sampled,
            num_sampled,
            source[batch.cu_num_logits[request] + node],
            batch.cu_num_logits,
            batch.cu_num_logits_np,
            self.sampler.sampling_states.max_num_logprobs(batch.idx_mapping_np),
        )


def _max_rows(vocab_size: int) -> int:
    """Rows of a chunk; a request's rows stay together, however many."""
    most = min(get_max_chunk_logits(vocab_size), MAX_CHUNK_BYTES // (4 * vocab_size))
    return max(1, int(most))


def _chunks(cu_num_logits: np.ndarray, max_rows: int) -> list[tuple[int, int]]:
    """Split requests into ranges of at most `max_rows` rows, at least one request each."""
    ranges, first, num_reqs = [], 0, len(cu_num_logits) - 1
    while first < num_reqs:
        last = first + 1
        while last < num_reqs and cu_num_logits[last + 1] - cu_num_logits[first] <= max_rows:
            last += 1
        ranges.append((first, last))
        first = last
    return ranges


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
