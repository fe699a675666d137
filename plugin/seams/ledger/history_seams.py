"""What trees rely on where sampling reads a request's history: grammars."""

from __future__ import annotations

from vllm_graft.seams.ledger.entry import Seam
from vllm_graft.seams.ledger.notation import seams

_GRAMMARS = "vLLM's grammars follow trees"

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
        ("request.Request", "has", "request_id, structured_output_request, use_structured_output", "whose tree it is"),
        ("core.sched.scheduler.Scheduler.update_draft_token_ids", "order", "request.is_prefill_chunk, request.spec_token_ids = self.structured_output_manager.validate_tokens(", "drafts come to the scheduler with their parents"),
        ("core.sched.scheduler.Scheduler.update_draft_token_ids_in_output", "order", "del spec_token_ids[orig_num_spec_tokens:], self.structured_output_manager.validate_tokens(, spec_token_ids.extend([-1] * num_invalid_tokens), sched_spec_tokens[req_id] = spec_token_ids", "likewise, in the place of async scheduling's placeholders"),
        ("core.sched.scheduler.Scheduler.get_grammar_bitmask", "source", "73809ab985c1", "drafts that are not padding count as masked, so that none of a tree's is refused"),
        ("worker.gpu.spec_decode.utils.DraftTokensHandler.set_draft_tokens", "source", "81da24204470", "wrapped on an object: it copies int64, and only in steps with structured output"),
        ("worker.gpu.structured_outputs.StructuredOutputsWorker.apply_grammar_bitmask", "call", "self, logits, input_batch, grammar_req_ids, grammar_bitmask", "masks logits in place, a request's i-th row by its i-th mask"),
        ("worker.gpu.structured_outputs.grammar_invalid_drafts", "source", "018796eb7eca", "refuses the drafts behind a number of them"),
    ),
)
