"""What graphs of a draft model rely on."""

from __future__ import annotations

from vllm_graft.seams.ledger.entry import Seam
from vllm_graft.seams.ledger.notation import seams

# Columns: path, kind, what is expected, why.
# fmt: off
DRAFT: tuple[Seam, ...] = (
    *seams("draft", "vLLM captures the loop of a draft model itself", "v1.worker.gpu",
        ("spec_decode.standalone_ar.speculator.StandaloneARSpeculator", "class", "DraftModelSpeculator", "its __new__ builds our subclass"),
        ("spec_decode.standalone_ar.speculator.StandaloneARSpeculator.propose", "order", "self._copy_request_inputs(, self._prefill(, self._multi_step_decode(", "what runs before the loop fills its static inputs"),
        ("spec_decode.standalone_ar.speculator.StandaloneARSpeculator._multi_step_decode", "source", "1b5bf6d94f93", "the loop itself, captured over stand-ins for its arguments"),
        ("spec_decode.standalone_ar.speculator.StandaloneARSpeculator.init_cudagraph_manager", "source", "afd049ac0d56", "does nothing: overridden to plan graphs"),
        ("spec_decode.standalone_ar.speculator.StandaloneARSpeculator.capture", "source", "3a73bffb7818", "does nothing: overridden to capture"),
        ("spec_decode.standalone_ar.speculator.StandaloneARSpeculator._prefill", "source", "d7593ba64abf", "the first pass itself, captured likewise"),
        ("spec_decode.standalone_ar.speculator.prepare_prefill_inputs", "source", "9dad3ec53ab8", "what the first pass reads of a batch; leaves index 0 of a last token in padding"),
        ("spec_decode.speculator.DraftModelSpeculator", "has", "_update_draft_decode_metadata, arange_np, attn_groups, block_tables, device, draft_tokens, idx_mapping, input_buffers, kv_cache_config, max_model_len, max_num_reqs, model_state, num_speculative_steps, supports_decode_metadata_update, vllm_config", "what a capture needs"),
        ("spec_decode.speculator.DraftModelSpeculator._build_attn_metadata", "source", {"0.32": "cb996f962019", "0.33": "20efa8f885e3"}, "overridden: in a capture the metadata is there"),
        ("spec_decode.speculator.DraftModelSpeculator._build_uniform_attn_metadata", "source", "ebbf12d81810", "goes through it"),
        ("block_table.BlockTables.compute_slot_mappings", "source", "7ca34ff54040", "index -1 maps to no slot: padding writes no K/V"),
    ),
)
