"""Drafts for a target that is served without one: its own MTP module, or a public EAGLE-3 head."""

import copy
import json
from typing import Any

from vllm_graft.base.options import target_of

DATED = "late 2025"
HEADS = {
    # Architecture, hidden size, layers, vocabulary: the head, and the model it was trained for.
    ("LlamaForCausalLM", 4096, 32, 128256): (
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        "meta-llama/Llama-3.1-8B-Instruct",
    ),
    ("LlamaForCausalLM", 8192, 80, 128256): (
        "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3",
        "meta-llama/Llama-3.3-70B-Instruct",
    ),
    ("Qwen3ForCausalLM", 4096, 36, 151936): (
        "RedHatAI/Qwen3-8B-speculator.eagle3",
        "Qwen/Qwen3-8B",
    ),
    ("Qwen3ForCausalLM", 5120, 40, 151936): (
        "RedHatAI/Qwen3-14B-speculator.eagle3",
        "Qwen/Qwen3-14B",
    ),
    ("Qwen3ForCausalLM", 5120, 64, 151936): (
        "RedHatAI/Qwen3-32B-speculator.eagle3",
        "Qwen/Qwen3-32B",
    ),
    ("GptOssForCausalLM", 2880, 24, 201088): (
        "RedHatAI/gpt-oss-20b-speculator.eagle3",
        "openai/gpt-oss-20b",
    ),
}
"""Heads that were public at the time of `DATED`."""

_MTP_DEPTH, HEAD_DEPTH = 3, 7


def mtp_config(model: Any) -> dict[str, Any] | None:
    """The speculative config by which a checkpoint's own MTP module drafts; None without one.
    `model`: vLLM's ``ModelConfig`` of the target. vLLM's speculative config knows the fields that
    say it."""
    from vllm.config import SpeculativeConfig

    try:
        modules = SpeculativeConfig.hf_config_override(copy.deepcopy(model.hf_config)).n_predict
    except Exception:  # No module is named, or one that vLLM can't serve.
        return None
    if not isinstance(modules, int) or modules < 1 or _is_cut(model.hf_config):
        return None
    tokens = modules if modules > 1 else _MTP_DEPTH
    return {"method": "mtp", "num_speculative_tokens": tokens}


def _is_cut(config: Any) -> bool:
    """Whether modules ask for types of layers that vLLM's configuration has cut off: an IndexError
    when Step 3.5 is loaded with them."""
    types = getattr(config, "layer_types", None)
    cut = types is not None and len(types) <= config.num_hidden_layers
    return cut and config.model_type == "step3p5"


def no_draft(vllm_config: Any, tokens: int = HEAD_DEPTH) -> str:
    """Say that there is no draft, and by which flag this target gets one. `vllm_config`: has the
    target. `tokens`: what ``num_speculative_tokens`` of an EAGLE-3 draft is set to."""
    model = target_of(vllm_config)
    if model is not None and (found := mtp_config(model)) is not None:
        return f"There is no draft, but the checkpoint has an MTP module: add {_flag(found)}."
    head, known = "DRAFT", "There is no draft model"
    if not getattr(model, "use_mla", False):
        known += ", and `vllm-graft train` makes one"
    if model is not None and (public := _public_head(model)) is not None:
        head, target = public
        known = (
            f"There is no draft model. For {target}, whose sizes this model has, {head} was "
            f"public in {DATED}"
        )
    found = {"method": "eagle3", "model": head, "num_speculative_tokens": tokens}
    return f"{known}: add {_flag(found)}."


def _public_head(model: Any) -> tuple[str, str] | None:
    text = getattr(model, "hf_text_config", None)
    sizes = [getattr(text, each, 0) for each in ("hidden_size", "num_hidden_layers", "vocab_size")]
    keys = ((each, *sizes) for each in getattr(model, "architectures", ()))
    return next((HEADS[key] for key in keys if key in HEADS), None)


def _flag(config: dict[str, Any]) -> str:
    return f"--speculative-config '{json.dumps(config)}'"
