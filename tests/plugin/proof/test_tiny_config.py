"""Tiny configurations of models that people serve: small, of the same family, fitting together."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plugin.plan.stranger_models import LLAMA, MODELS
from vllm_graft.proof.tiny_config import VOCABULARY, TinyConfig, text_of

EAGLE = "EAGLE3-LLaMA3.1-Instruct-8B"
KEPT = {
    LLAMA: {"head_dim": 128, "rope_scaling": MODELS[LLAMA]["rope_scaling"]},
    "Qwen3.5-9B": {"head_dim": 256, "linear_key_head_dim": 128, "full_attention_interval": 4},
    "gpt-oss-20b": {"head_dim": 64, "swiglu_limit": 7.0, "attention_bias": True},
    "gemma-3-27b-it": {"head_dim": 128, "query_pre_attn_scalar": 168},
    "GLM-4.6-FP8": {"head_dim": 128, "num_nextn_predict_layers": 1},
    "DeepSeek-R1": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128},
    "Qwen3-VL-8B-Instruct": {"head_dim": 128},
}
"""What kernels are chosen by, and stays."""


def numbers(config: Any) -> list[int]:
    if isinstance(config, dict):
        return [each for value in config.values() for each in numbers(value)]
    return [config] if type(config) is int else []


@pytest.mark.parametrize("name", KEPT)
def test_a_family_keeps_what_kernels_are_chosen_by(name: str) -> None:
    made = TinyConfig(MODELS[name]).target()
    text, served = text_of(made), text_of(MODELS[name])
    assert made["architectures"] == MODELS[name]["architectures"]
    assert {key: text[key] for key in KEPT[name]} == KEPT[name]
    assert "quantization_config" not in made
    assert text["vocab_size"] == VOCABULARY
    assert text["num_hidden_layers"] <= 6 < served["num_hidden_layers"]
    assert text["hidden_size"] <= 512
    heads = [value for key, value in text.items() if key.endswith("_heads")]
    assert heads
    assert max(heads) <= 16
    # Each kind of layer that the model has is there.
    if "layer_types" in served:
        assert set(text["layer_types"]) == set(served["layer_types"])
        assert len(text["layer_types"]) == text["num_hidden_layers"]


@pytest.mark.parametrize("name", ["gpt-oss-20b", "GLM-4.6-FP8", "DeepSeek-R1"])
def test_every_expert_is_chosen(name: str) -> None:
    """So that rounding can't choose another one, which would look like a fault."""
    made = TinyConfig(MODELS[name]).target()
    counts = {made[key] for key in made if "expert" in key and not key.startswith("n_shared")}
    assert counts - {made.get("moe_intermediate_size")} == {8}
    assert made.get("n_group", 1) == 1


def test_special_tokens_are_different_and_no_text() -> None:
    made = TinyConfig(MODELS["Qwen3-VL-8B-Instruct"]).target()
    special = [made[key] for key in made if key.endswith("_token_id")]
    assert sorted(special) == [8, 9, 10, 11]
    assert made["vision_config"]["out_hidden_size"] == made["text_config"]["hidden_size"]
    assert made["vision_config"]["deepstack_visual_indexes"] == [0, 1]


def test_a_draft_fits_its_target() -> None:
    tiny = TinyConfig(MODELS[LLAMA], MODELS[EAGLE])
    target, draft = tiny.target(), tiny.draft("eagle3")
    assert draft["hidden_size"] == target["hidden_size"]
    assert draft["num_hidden_layers"] == 1
    assert draft["draft_vocab_size"] < draft["vocab_size"] == target["vocab_size"]
    read = draft["eagle_aux_hidden_state_layer_ids"]
    assert sorted(set(read)) == read
    assert 0 < read[0] < read[-1] < target["num_hidden_layers"]
    # A draft that reads more layers makes the target deeper.
    block = {**MODELS[EAGLE], "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 30]}}
    tiny = TinyConfig(MODELS[LLAMA], block)
    assert tiny.target()["num_hidden_layers"] == 6
    assert tiny.draft("dflash")["dflash_config"]["target_layer_ids"] == [1, 2, 3, 4, 5]
    assert max(numbers(tiny.draft("dflash"))) <= 2**17
