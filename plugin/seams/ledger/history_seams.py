"""What trees rely on where sampling reads a request's history: grammars, penalties, bad words."""

from __future__ import annotations

from vllm_graft.seams.ledger.entry import Seam
from vllm_graft.seams.ledger.notation import seams

_GRAMMARS = "vLLM's grammars follow trees"
_PROCESSORS = "vLLM's logits processors are told each row's history"

# Columns: path, kind, what is expected, why.
# fmt: off
HISTORY: tuple[Seam, ...] = (
    *seams("tree", _GRAMMARS, "v1.structured_output",
        ("StructuredOutputManager", "has", "vllm_config", "rows of masks of a request at most"),
        ("StructuredOutputManager.validate_tokens", "call", "self, request, spec_tokens", "wrapped: a tree is no chain to cut, and keeps its parents"),
        ("StructuredOutputManager.grammar_bitmask", "source", {"0.32": "326a83ff7daf", "0.33": "6b1997011e97"}, "wrapped: of padded drafts it masks the root's row and sets all other bits, where each request's rows begin"),
        ("StructuredOutputManager._get_constraint_bounds", "call", "self, request, spec_tokens, spec_tokens_committed=", "where a path leaves the reasoning, behind which the grammar begins"),
        ("backend_types.StructuredOutputGrammar", "has", "accept_tokens, fill_bitmask, is_terminated, rollback, validate_tokens", "walks the tree"),
        ("request.StructuredOutputRequest", "has", "grammar", "likewise"),
    ),
    *seams("tree", _GRAMMARS, "v1",
        ("core.sched.scheduler.Scheduler.update_draft_token_ids", "order", "request.is_prefill_chunk, request.spec_token_ids = self.structured_output_manager.validate_tokens(", "drafts come to the scheduler with their parents"),
        ("core.sched.scheduler.Scheduler.update_draft_token_ids_in_output", "order", "del spec_token_ids[orig_num_spec_tokens:], self.structured_output_manager.validate_tokens(, spec_token_ids.extend([-1] * num_invalid_tokens), sched_spec_tokens[req_id] = spec_token_ids", "likewise, in the place of async scheduling's placeholders"),
        ("core.sched.scheduler.Scheduler.get_grammar_bitmask", "source", "73809ab985c1", "drafts that are not padding count as masked, so that none of a tree's is refused"),
        ("worker.gpu.spec_decode.utils.DraftTokensHandler.set_draft_tokens", "source", "81da24204470", "wrapped on an object: it copies int64, and only in steps with structured output"),
        ("worker.gpu.structured_outputs.StructuredOutputsWorker.apply_grammar_bitmask", "call", "self, logits, input_batch, grammar_req_ids, grammar_bitmask", "masks logits in place, a request's i-th row by its i-th mask"),
        ("worker.gpu.structured_outputs.grammar_invalid_drafts", "source", "018796eb7eca", "refuses the drafts behind a number of them"),
    ),
    *seams("tree", _PROCESSORS, "v1.worker.gpu.sample",
        ("penalties.PenaltiesState", "has", "frequency_penalty, output_bin_counts, presence_penalty, prompt_bin_mask, repetition_penalty, use_penalty", "what our kernel reads in the place of vLLM's"),
        ("penalties.PenaltiesState.apply", "source", "306ce854d300", "replaced on an object where there are drafts: it takes the rows before a row for its history"),
        ("penalties.apply_penalties", "source", {"0.32": "a91a5c14a0f0", "0.33": "761c121237ea"}, "ours does the same arithmetic in the same order"),
        ("bad_words.BadWordsState", "has", "bad_word_offsets, bad_word_token_ids, num_bad_words, req_states", "what our kernel reads in the place of vLLM's"),
        ("bad_words.BadWordsState.apply", "source", "cb7d7e39331f", "replaced likewise"),
        ("bad_words.apply_bad_words", "source", "a4efaffcd56c", "ours forbids the same tokens"),
        ("thinking_budget.ThinkingBudgetState", "has", "cached_last_end, cached_last_start, enabled, natural_reasoning_end_token_ids, reasoning_end_token_ids, reasoning_start_token_ids, req_states, thinking_token_budget, use_thinking_budget", "what our kernel reads in the place of vLLM's"),
        ("thinking_budget.ThinkingBudgetState.apply", "source", "5143e2c63e60", "replaced likewise; without rows it only looks for the markers"),
        ("thinking_budget.apply_thinking_budget", "source", "62477f9550e3", "ours forces the same tokens"),
        ("logits_processor.interface.LogitsContext", "has", "expanded_idx_mapping, expanded_local_pos, idx_mapping_np, input_ids", "rows that are changed"),
        ("logits_processor.interface.LogitsProcRequestState", "has", "all_token_ids, prompt_len, total_len", "what was emitted"),
        ("sampler.Sampler.apply_sampling_params", "order", "expanded_local_pos=expanded_local_pos, input_ids=input_ids, for processor in self.logits_processors:, logits = processor.apply(logits, ctx), self.thinking_budget_state.apply(logits, ctx)", "calls them with the rows of whole requests"),
    ),
)
