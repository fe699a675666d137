"""Drafts that were made for another target are refused; `test_automatic` has the presets."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.checkpoints import write_vocabulary
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


TOKENS = {f"t{id}": id for id in range(2000)}
TURNED = {token: 1999 - id for token, id in TOKENS.items()}


@pytest.fixture
def folders(vllm_config: Any, tmp_path: Path) -> tuple[Path, Path]:
    """The folders of target and draft, which have no tokenizers yet."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    pair(vllm_config, HEAD, LLAMA)
    vllm_config.model_config.tokenizer = str(target)
    vllm_config.speculative_config.draft_model_config.model = str(draft)
    return target, draft


@pytest.mark.parametrize("form", ["pairs", "list", "vocab.json"])
@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_a_draft_with_another_tokenizer_is_refused(
    vllm_config: Any, folders: tuple[Path, Path], form: Any, method: str
) -> None:
    vllm_config.speculative_config.method = method
    for folder, tokens in zip(folders, (TOKENS, TURNED)):
        write_vocabulary(folder, tokens, form)
    with pytest.raises(ConfigError) as caught:
        validate(GraftConfig.parse({"tree": {"topk": 1, "steps": 31}}), vllm_config)
    says = "2000 ids are other tokens, as 0, which is 't1999' to the draft and 't0' to the target."
    assert says in str(caught.value)
    assert "remove the tokenizer from its folder" in str(caught.value)
    vllm_config.speculative_config.use_heterogeneous_vocab = True
    validate(GraftConfig.parse({"tree": {"topk": 1, "steps": 31}}), vllm_config)


@pytest.mark.parametrize(
    "draft",
    [
        None,
        TOKENS,
        # Tokens of a fine-tuned target in the places of those that were left free, and more.
        {**{token: id for token, id in TOKENS.items() if id < 1800}, "new": 1900, "more": 2100},
        dict(list(TOKENS.items())[:1000]),
        {"t0": "0", "t1": [1], "t2": None},
    ],
)
def test_a_draft_with_the_same_tokens_or_none_is_served(
    vllm_config: Any, folders: tuple[Path, Path], draft: Any
) -> None:
    write_vocabulary(folders[0], TOKENS)
    if draft is not None:
        write_vocabulary(folders[1], draft)
    validate(GraftConfig.parse({"tree": {}}), vllm_config)


@pytest.mark.parametrize(
    "text", ["", "[1, 2]", '{"model": 3}', '{"model": {"vocab": [1]}}', "\xff"]
)
def test_a_tokenizer_in_another_form_says_nothing(
    vllm_config: Any, folders: tuple[Path, Path], text: str
) -> None:
    write_vocabulary(folders[0], TOKENS)
    write_vocabulary(folders[1], TURNED)
    (folders[1] / "tokenizer.json").write_bytes(text.encode("latin-1"))
    validate(GraftConfig.parse({"tree": {}}), vllm_config)


def test_added_tokens_count(vllm_config: Any, folders: tuple[Path, Path]) -> None:
    added = [{"content": f"t{id}", "id": id} for id in range(1000, 2000)]
    write_vocabulary(folders[0], TOKENS)
    write_vocabulary(folders[1], dict(list(TOKENS.items())[:1000]), added=added)
    validate(GraftConfig.parse({"tree": {}}), vllm_config)
    for each in added:
        each["content"] = "another"
    folder = folders[1].with_name("other")
    vllm_config.speculative_config.draft_model_config.model = str(folder)
    write_vocabulary(folder, {}, added=added)
    with pytest.raises(ConfigError, match="1000 ids are other tokens, as 1000, which is 'another'"):
        validate(GraftConfig.parse({"tree": {}}), vllm_config)


def test_files_of_the_hub_are_read_where_they_are(
    vllm_config: Any, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    write_vocabulary(folders[0], TOKENS)
    write_vocabulary(folders[1], TURNED)
    draft = vllm_config.speculative_config.draft_model_config
    draft.model, draft.revision, asked = "some/draft", "v1", []

    def cached(repository: str, name: str, *, revision: str | None) -> str:
        asked.append((repository, name, revision))
        return str(folders[1] / name)

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    with pytest.raises(ConfigError, match="The tokenizer beside the draft"):
        validate(GraftConfig.parse({"tree": {}}), vllm_config)
    assert asked == [("some/draft", "tokenizer.json", "v1")]
