"""Drafts that were made for another target are refused; `test_automatic` has the presets."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.refusals import validate
from vllm_graft.base.errors import ConfigError
from vllm_graft.config import GraftConfig

LLAMA = {"hidden_size": 4096, "vocab_size": 128_256, "num_hidden_layers": 32}
HEAD = {**LLAMA, "num_hidden_layers": 1, "draft_vocab_size": 32_000}
PAIR = Path(__file__).parents[1] / "pair"


def pair(config: Any, draft: dict[str, Any], target: dict[str, Any], method: str = "eagle3") -> Any:
    """Give a configuration a draft and a target of these values."""
    own = SimpleNamespace(**draft)
    speculative = config.speculative_config
    speculative.method = method
    speculative.draft_model_config.hf_config = own
    speculative.draft_model_config.hf_text_config = own
    config.model_config.hf_text_config = SimpleNamespace(**target)
    return config


@pytest.mark.parametrize("tree", [{}, {"topk": 1, "steps": 31}])
@pytest.mark.parametrize(
    ("draft", "method", "words"),
    [
        ({"hidden_size": 5120}, "eagle3", "states of 5120 numbers, but the target's hidden_size"),
        ({"hidden_size": 5120}, "eagle", "states of 5120 numbers"),
        ({"target_hidden_size": 5120}, "eagle3", "states of 5120 numbers"),
        ({"backbone_hidden_size": 2048}, "mtp", "states of 2048 numbers"),
        ({"vocab_size": 151_936}, "eagle3", "vocab_size is 151936, but the target's is 128256"),
        ({"vocab_size": 32_000}, "draft_model", "vocab_size is 32000"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 40, 77]}, "eagle3", "behind layer 40, but the"),
        ({"dflash_config": {"target_layer_ids": [2, 32]}}, "eagle3", "behind layer 33"),
        ({"target_layer_ids": [61]}, "eagle3", "behind layer 62, but the target has 32"),
    ],
)
def test_a_head_for_another_model_is_refused(
    vllm_config: Any, draft: dict[str, Any], method: str, words: str, tree: dict[str, Any]
) -> None:
    pair(vllm_config, {**HEAD, **draft}, LLAMA, method)
    with pytest.raises(ConfigError) as caught:
        validate(GraftConfig.parse({"tree": tree}), vllm_config)
    message = str(caught.value)
    assert words in message
    assert "set speculative_config.model to a draft that was made for this target" in message
    assert len(message.splitlines()) == 2
    validate(GraftConfig(), vllm_config)


@pytest.mark.parametrize(
    ("draft", "method"),
    [
        ({}, "eagle3"),
        # The head of a larger target has its own, smaller states.
        ({"hidden_size": 1024, "target_hidden_size": 4096}, "eagle3"),
        ({"target_hidden_size": None}, "eagle3"),
        ({"hidden_size": None, "vocab_size": None}, "eagle3"),
        ({"hidden_size": "4096", "vocab_size": True}, "eagle3"),
        # Fine-tuned targets have tokens more, and tables are padded.
        ({"vocab_size": 128_256 + 256}, "eagle3"),
        ({"vocab_size": 130_000}, "dspark"),
        ({"hidden_size": 1024}, "draft_model"),
        ({"hidden_size": 256, "backbone_hidden_size": 4096}, "mtp"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 16, 32]}, "eagle3"),
        ({"eagle_aux_hidden_state_layer_ids": None, "dflash_config": None}, "eagle3"),
        ({"dflash_config": {"target_layer_ids": [1, 31]}}, "eagle3"),
    ],
)
def test_what_fits_or_is_unknown_is_served(
    vllm_config: Any, draft: dict[str, Any], method: str
) -> None:
    pair(vllm_config, {**HEAD, **draft}, LLAMA, method)
    validate(GraftConfig.parse({"tree": {}}), vllm_config)
    pair(vllm_config, {}, LLAMA, method)
    validate(GraftConfig.parse({"tree": {}}), vllm_config)
    pair(vllm_config, {**HEAD, **draft}, {}, method)
    validate(GraftConfig.parse({"tree": {}}), vllm_config)


def test_laguna_takes_the_size_of_its_target(vllm_config: Any) -> None:
    pair(vllm_config, {**HEAD, "hidden_size": 1024, "block_size": 32}, LLAMA, "dflash")
    draft = vllm_config.speculative_config.draft_model_config
    draft.architectures = ["DFlashDraftModel"]
    with pytest.raises(ConfigError, match="states of 1024 numbers"):
        validate(GraftConfig.parse({"tree": {}}), vllm_config)
    draft.architectures = ["DFlashLagunaForCausalLM"]
    validate(GraftConfig.parse({"tree": {}}), vllm_config)


def test_the_shipped_pair_fits(vllm_config: Any) -> None:
    draft, target = (
        json.loads((PAIR / name / "config.json").read_text()) for name in ("eagle3", "target")
    )
    pair(vllm_config, draft, target)
    validate(GraftConfig.parse({"tree": {}}), vllm_config)
    pair(vllm_config, {**draft, "vocab_size": 1024}, target)
    with pytest.raises(ConfigError, match="vocab_size is 1024"):
        validate(GraftConfig.parse({"tree": {}}), vllm_config)
