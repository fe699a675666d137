"""Exact verification of a draft tree: draw the target's token at every node, then walk."""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from vllm.config import SpeculativeConfig
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler, get_max_chunk_logits

from vllm_graft.seams.wrap import around
from vllm_graft.spec_decode.kernels.history import (
    BadWords,
    PathTokens,
    Penalties,
    ThinkingBudgets,
    end_reasoning,
    forbid_bad_words,
    path_tokens,
    penalize,
)
from vllm_graft.spec_decode.kernels.verify import walk_tree
from vllm_graft.spec_decode.trees.tree import TreeState
from vllm_graft.spec_decode.verification.context import TreeContext

Apply = Callable[[torch.Tensor, LogitsContext], Any]

MAX_CHUNK_BYTES = 2**28
"""Bytes of float32 logits in one chunk; torch's top-p sorts them into values and 64-bit indices, so
a quarter of vLLM's own limit for chains keeps the total under 1 GiB."""


class VerifiedRows(NamedTuple):
    """The rows that a step verifies, and where its results go.

    Attributes:
        logits: ``[num_logits, vocab]``; of as many rows or more are `ids` (int32), `positions`
            (int64), and `drafts`, which are `ids` or -1 where a grammar refused the draft.
        sampled: int64 ``[num_reqs, num_nodes + 1]``.
        num_sampled: int32 ``[num_reqs]``.
        num_rejected: likewise; None where logprobs are wanted.
    """

    logits: torch.Tensor
    ids: torch.Tensor
    positions: torch.Tensor
    drafts: torch.Tensor
    sampled: torch.Tensor
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor | None


class Chunk(NamedTuple):
    """Requests of a batch that are verified together, and their rows among the batch's logits. The
    request bounds among these rows, int32 ``[requests + 1]``, are on the device and the host."""

    requests: slice
    rows: slice
    cu_num_logits: torch.Tensor
    cu_num_logits_np: np.ndarray

    @classmethod
    def of(cls, batch: InputBatch, first: int, last: int) -> Self:
        """The requests from `first` up to, but not including, `last`."""
        bounds = slice(first, last + 1)
        starts, starts_np = batch.cu_num_logits[bounds], batch.cu_num_logits_np[bounds]
        rows = slice(int(starts_np[0]), int(starts_np[-1]))
        if rows.start:
            starts, starts_np = starts - rows.start, starts_np - rows.start
        return cls(slice(first, last), rows, starts, starts_np)


class TreeRejectionSampler(RejectionSampler):
    """Emits, for each request, the longest path of its tree that the target's own draws follow.

    Every emitted token is a draw of vLLM's sampler from the target, given the tokens before it and
    with noise keyed by (seed, position), as without speculation: the tree decides how many draws
    are made in one pass, never what they are. So the output's distribution is the target's, even
    where drafts were chosen by looking at that noise."""

    def __init__(
        self,
        sampler: Sampler,
        config: SpeculativeConfig,
        device: torch.device,
        context: TreeContext,
    ) -> None:
        super().__init__(sampler, config, device)
        self.context = context
        if context.coupled:
            # FlashInfer draws with noise of its own; drafts are coupled to that of vLLM's sampler.
            sampler.use_flashinfer = False

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Verify a batch. `logits`: ``[num_logits, vocab]``, request after request, its root first,
        then its nodes. `draft_logits`: not used; drafts are chosen, not sampled. `invalid_drafts`:
        bool ``[num_logits]``, drafts that a grammar refused."""
        batch, sampler, context = input_batch, self.sampler, self.context
        num_nans = get_num_nans(logits) if sampler.compute_nans else None
        positions, ids = _with_logits(batch.positions, batch), _with_logits(batch.input_ids, batch)
        sampled = ids.new_empty((batch.num_reqs, context.shape.num_nodes + 1), dtype=torch.int64)
        num_sampled = batch.seq_lens.new_empty(batch.num_reqs)
        drafts = ids
        if invalid_drafts is not None:
            drafts = ids[: len(invalid_drafts)].masked_fill(invalid_drafts, -1)
        num_rejected = None if self._wants_logprobs(batch) else torch.empty_like(num_sampled)
        rows = VerifiedRows(logits, ids, positions, drafts, sampled, num_sampled, num_rejected)
        logprobs = self._verify(rows, batch)
        if num_rejected is None:
            # Logprobs are those of rows that an unfinished prompt has, too.
            prefill_len = sampler.req_states.prefill_len.gpu
            num_sampled, num_rejected = get_num_sampled_and_rejected(
                num_sampled, batch.seq_lens, batch.cu_num_logits, batch.idx_mapping, prefill_len
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

    def _verify(self, rows: VerifiedRows, batch: InputBatch) -> LogprobsTensors | None:
        chunks = _chunks(batch, _max_rows(rows.logits.shape[1]))
        if rows.num_rejected is not None:
            drawn = [self._draw(rows, batch, chunk)[0] for chunk in chunks]
            whole = chunks[0] if len(chunks) == 1 else Chunk.of(batch, 0, batch.num_reqs)
            self.walk(drawn[0] if len(drawn) == 1 else torch.cat(drawn), rows, batch, whole)
            return None
        # Finish each chunk before the next, so that the float32 logits of only one are kept.
        parts = [self._emit_logprobs(rows, batch, chunk) for chunk in chunks]
        is_flat = rows.logits.shape[0] == batch.num_reqs
        bounds = None if is_flat else batch.cu_num_logits_np.tolist()
        return LogprobsTensors.cat(parts, bounds)

    def _draw(
        self, rows: VerifiedRows, batch: InputBatch, chunk: Chunk
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the target's token at every row of a chunk, which bounds the float32 copies. Where
        only temperature changes the logits, vLLM's kernel reads the model's, and there is no copy.
        Returns the tokens, int64 ``[num_rows]``, and the logits that they were drawn from, or the
        model's own logits if the processed ones are not needed."""
        mine, requests = chunk.rows, chunk.requests
        wants_processed = self._processed and self._wants_logprobs(batch)
        slots = batch.idx_mapping_np[requests]
        if not wants_processed and self.context.by_temperature[slots].all():
            states, logits = self.sampler.sampling_states, rows.logits
            if mine.stop - mine.start < len(logits):
                logits = logits[mine]
            tokens: torch.Tensor = gumbel_sample(
                logits, _behind(batch.expanded_idx_mapping, mine), states.temperature.gpu,
                states.seeds.gpu, _behind(rows.positions, mine), apply_temperature=True,
                is_drafting=False, use_fp64=self.sampler.use_fp64_gumbel,
            )  # fmt: skip
            return tokens, logits
        drawn: tuple[torch.Tensor, torch.Tensor] = self.sampler.sample(
            rows.logits[mine], batch.expanded_idx_mapping[mine], batch.idx_mapping[requests], slots,
            rows.positions[mine], rows.ids[mine], batch.expanded_local_pos[mine],
            batch.seq_lens_cpu_upper_bound.numpy()[requests], return_logprobs=wants_processed,
        )  # fmt: skip
        return drawn

    def walk(
        self, drawn: torch.Tensor, rows: VerifiedRows, batch: InputBatch, chunk: Chunk
    ) -> None:
        """Walk the trees of a chunk by the drawn tokens, int64 ``[num_rows]``."""
        rejected, context = rows.num_rejected, self.context
        walk_tree(
            drawn,
            _behind(rows.drafts, chunk.rows),
            chunk.cu_num_logits,
            _behind(batch.idx_mapping, chunk.requests),
            context.tree,
            _behind(rows.sampled, chunk.requests),
            _behind(context.path, chunk.requests),
            _behind(rows.num_sampled, chunk.requests),
            # Drafts after an unfinished prompt are placeholders: a remote KV load pads with them.
            positions=_behind(rows.positions, chunk.rows),
            prefill_len=self.sampler.req_states.prefill_len.gpu,
            seq_lens=_behind(batch.seq_lens, chunk.requests),
            num_rejected=None if rejected is None else _behind(rejected, chunk.requests),
            emitted=context.emitted,
            extra_nodes=context.extra_nodes,
            extra_counts=context.extra_counts,
            teaches=context.teaches,
        )

    @property
    def _processed(self) -> bool:
        return self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES

    def _wants_logprobs(self, batch: InputBatch) -> bool:
        return self._most_logprobs(batch) != NO_LOGPROBS or self._most_ids(batch) > 0

    def _most_logprobs(self, batch: InputBatch) -> int:
        """Best tokens whose logprobs a request of the batch wants, at most; or `NO_LOGPROBS`."""
        return int(self.sampler.sampling_states.max_num_logprobs(batch.idx_mapping_np))

    def _most_ids(self, batch: InputBatch) -> int:
        """Tokens that a request of the batch chose to have the logprobs of, at most."""
        return int(self.sampler.logprob_token_ids_state.max_num_token_ids(batch.idx_mapping_np))

    def _emit_logprobs(
        self, rows: VerifiedRows, batch: InputBatch, chunk: Chunk
    ) -> LogprobsTensors:
        """Draw, walk, and return logprobs along a chunk's accepted paths, in a chain's order."""
        drawn, processed = self._draw(rows, batch, chunk)
        self.walk(drawn, rows, batch, chunk)
        source = processed if self._processed else rows.logits[chunk.rows]
        starts, local = chunk.cu_num_logits, batch.expanded_local_pos[chunk.rows]
        num_sampled, path = rows.num_sampled[chunk.requests], self.context.path[chunk.requests]
        request = torch.arange(len(num_sampled), device=source.device).repeat_interleave(
            starts.diff(), output_size=source.shape[0]
        )
        accepted = local < num_sampled[request]
        node = torch.where(accepted, path[request, local.long()], local)
        logits = source[starts[request] + node]
        most = self._most_logprobs(batch)
        if (most_ids := self._most_ids(batch)) > 0:
            # As vLLM's sampler has them: its own verification gives the best tokens' instead.
            emitted = rows.sampled[chunk.requests][request, local.long()]
            return compute_topk_scores(
                logits,
                max(most, 0),
                emitted.where(accepted, 0),
                logprob_token_ids_state=self.sampler.logprob_token_ids_state,
                expanded_idx_mapping=batch.expanded_idx_mapping[chunk.rows],
                max_per_req_token_ids=most_ids,
                logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
            )
        return self._get_logprobs_tensors(
            rows.sampled[chunk.requests],
            num_sampled,
            logits,
            starts,
            chunk.cu_num_logits_np,
            # The whole batch's number: chunks are concatenated, so all need the same width.
            most,
        )


def _max_rows(vocab_size: int) -> int:
    most = min(get_max_chunk_logits(vocab_size), MAX_CHUNK_BYTES // (4 * vocab_size))
    return max(1, int(most))


def _chunks(batch: InputBatch, max_rows: int) -> list[Chunk]:
    starts = batch.cu_num_logits_np
    if (num_rows := int(starts[-1])) <= max_rows:
        requests = slice(0, len(starts) - 1)
        return [Chunk(requests, slice(0, num_rows), batch.cu_num_logits, starts)]
    return [Chunk.of(batch, *each) for each in _ranges(starts, max_rows)]


def _ranges(cu_num_logits: np.ndarray, max_rows: int) -> list[tuple[int, int]]:
    """Split requests into ranges of at most `max_rows` rows, at least one request each."""
    ranges, first, num_reqs = [], 0, len(cu_num_logits) - 1
    while first < num_reqs:
        most = cu_num_logits[first] + max_rows
        fitting = int(np.searchsorted(cu_num_logits, most, side="right")) - 1
        last = max(first + 1, fitting)
        ranges.append((first, last))
        first = last
    return ranges


def _with_logits(rows: torch.Tensor, batch: InputBatch) -> torch.Tensor:
    """The `rows` ``[>= num_tokens]`` that have logits, first: all, unless prompts run as well."""
    indices = batch.logits_indices
    return rows if len(indices) == batch.num_tokens else rows[indices]


def _behind(tensor: torch.Tensor, span: slice) -> torch.Tensor:
    """A tensor from where a span starts on, for a kernel that knows where it ends: to slice takes
    the host as long as half a launch."""
    return tensor[span.start :] if span.start else tensor


def follow_paths(sampler: Sampler, tree: TreeState) -> None:
    """Let vLLM's penalties, bad words and thinking budgets read each verified node's own path. The
    `tree` has the topology by request-state index."""
    for processor in sampler.logits_processors:
        if isinstance(processor, PenaltiesState):
            _along_paths(_penalize, processor, tree)
        elif isinstance(processor, BadWordsState):
            _along_paths(_forbid_bad_words, processor, tree)
    _along_paths(_end_reasoning, sampler.thinking_budget_state, tree)


def _along_paths(
    change: Callable[[Any, Apply, torch.Tensor, LogitsContext, TreeState], None],
    state: Any,
    tree: TreeState,
) -> None:
    @around(state, "apply")
    def then_change(original: Apply, logits: torch.Tensor, ctx: LogitsContext) -> Any:
        if len(logits) == len(ctx.idx_mapping_np):  # Without drafts a request has one row.
            return original(logits, ctx)
        change(state, original, logits, ctx, tree)
        return logits


def _penalize(
    state: Any, original: Apply, logits: torch.Tensor, ctx: LogitsContext, tree: TreeState
) -> None:
    if state.use_penalty[ctx.idx_mapping_np].any():
        # vLLM writes into other memory in each step, so none of it is kept here.
        penalties = Penalties(
            state.repetition_penalty.gpu,
            state.frequency_penalty.gpu,
            state.presence_penalty.gpu,
            state.prompt_bin_mask,
            state.output_bin_counts,
        )
        penalize(logits, ctx.expanded_idx_mapping, _paths(ctx, tree), penalties)


def _forbid_bad_words(
    state: Any, original: Apply, logits: torch.Tensor, ctx: LogitsContext, tree: TreeState
) -> None:
    if most := int(state.num_bad_words.np[ctx.idx_mapping_np].max()):
        requests = state.req_states
        words = BadWords(
            state.num_bad_words.gpu,
            state.bad_word_offsets.gpu,
            state.bad_word_token_ids.gpu,
            requests.all_token_ids.gpu,
            requests.prompt_len.gpu,
            requests.total_len.gpu,
        )
        forbid_bad_words(logits, ctx.expanded_idx_mapping, _paths(ctx, tree), words, most)


def _end_reasoning(
    state: Any, original: Apply, logits: torch.Tensor, ctx: LogitsContext, tree: TreeState
) -> None:
    if state.enabled and state.use_thinking_budget[ctx.idx_mapping_np].any():
        # Without rows vLLM only looks for markers among the tokens that came since.
        original(logits[:0], ctx)
        requests = state.req_states
        thinking = ThinkingBudgets(
            state.thinking_token_budget.gpu, state.cached_last_start, state.cached_last_end,
            requests.all_token_ids.gpu, requests.total_len.gpu, state.reasoning_start_token_ids,
            state.natural_reasoning_end_token_ids, state.reasoning_end_token_ids,
        )  # fmt: skip
        end_reasoning(logits, ctx.expanded_idx_mapping, _paths(ctx, tree), thinking)


def _paths(ctx: LogitsContext, tree: TreeState) -> PathTokens:
    return path_tokens(ctx.input_ids, ctx.expanded_local_pos, ctx.expanded_idx_mapping, tree)
