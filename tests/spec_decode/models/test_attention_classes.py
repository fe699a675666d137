"""Models of vLLM's with attention layers of classes that no family knows."""

from types import SimpleNamespace

import pytest
from vllm.model_executor.models import ModelRegistry

from vllm_graft.spec_decode.targets.families import (
    FEATURES,
    own_attention,
    served_features,
    unserved_in_model,
)


def has(*architectures: str, text: tuple[str, ...] = ()) -> str:
    inner = SimpleNamespace(architectures=text)
    return own_attention(SimpleNamespace(architectures=architectures, hf_text_config=inner))


@pytest.mark.parametrize(
    ("architecture", "own"),
    [
        ("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3SparseAttention"),
        ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseAttention"),
        ("MiniMaxM3MTP", "MiniMaxM3SparseAttention"),
        ("DeepseekV4ForCausalLM", "DeepseekV4Attention"),
    ],
)
def test_a_class_of_a_model_s_own_is_found(architecture: str, own: str) -> None:
    assert has(architecture) == f"has attention layers of a class of its own ({own})"
    assert has("LlamaForCausalLM", text=(architecture,)) == has(architecture)


SERVED = [f"{name}ForCausalLM" for name in (
    "Llama", "Llama4", "Qwen3", "Qwen3Moe", "Qwen3Next", "Gemma3", "Gemma4", "GptOss", "DeepseekV2",
    "DeepseekV3", "Glm4Moe", "KimiLinear", "MiniMaxM2", "NemotronH"
)]  # fmt: skip


def test_models_with_known_layers_are_not_taken_for_such() -> None:
    """DeepSeek's file has a cache of its own beside MLA, and Kimi Linear's a class that we know."""
    assert set(SERVED) <= set(ModelRegistry.models)
    assert [name for name in SERVED if has(name)] == []


@pytest.mark.parametrize("architectures", [(), ("NobodyKnowsIt",), ("LlamaForCausalLM",)])
def test_what_is_unknown_has_nothing(architectures: tuple[str, ...]) -> None:
    assert has(*architectures) == ""
    assert own_attention(SimpleNamespace()) == ""


def test_a_chain_is_drafted_for_it() -> None:
    usual = ("is_hybrid", "is_attention_free", "use_mla", "is_encoder_decoder", "uses_alibi")
    model = SimpleNamespace(
        **dict.fromkeys(usual, False),
        architectures=["MiniMaxM3SparseForConditionalGeneration"],
        hf_text_config=SimpleNamespace(),
    )
    [(feature, says)] = unserved_in_model(model, served_features())
    assert feature in FEATURES
    assert feature.chain
    assert "MiniMaxM3SparseAttention" in says
