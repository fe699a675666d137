"""The wide pairs with and without windows, at a small width: what vLLM makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import windowed_pair
from benchmarks.real_pair.widening import Shape
from tests.support.shipped_pair import SHIPPED
from vllm_graft.spec_decode.targets.dense.window import window_of
from vllm_graft.testing import greedy, model_runner, spec_metrics
from vllm_graft.testing.pairs import Pair

WINDOW, TOKENS, PROMPT = 16, 8, 70
SMALL_WIDE = Shape(192, 448, 2, 1, 64, 12, 2100, 1040)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Both pairs, made of the tests' own by the command."""
    folder: Path = tmp_path_factory.mktemp("pairs")
    wide, windowed = folder / "wide", folder / "windowed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windowed_pair, "WIDE", SMALL_WIDE)
        arguments = ["--window", str(WINDOW), "--prompt-tokens", str(PROMPT)]
        arguments += ["--context", "256", "--trained", "128"]
        assert windowed_pair.main([str(SHIPPED), str(wide), str(windowed), *arguments]) == 0
    return wide, windowed


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def test_both_pairs_have_the_same_weights(pairs: tuple[Path, Path]) -> None:
    wide, windowed = pairs
    for part in ("target", "eagle3"):
        names = {file.name for file in (wide / part).iterdir()}
        assert names == {file.name for file in (windowed / part).iterdir()}
        for name in names - {"config.json"}:
            assert (windowed / part / name).resolve() == (wide / part / name).resolve()
    assert config_of(wide / "eagle3") == config_of(windowed / "eagle3")
    before, after = config_of(wide / "target"), config_of(windowed / "target")
    assert "layer_types" not in before
    assert after == before | {
        "sliding_window": WINDOW,
        "layer_types": ["full_attention"] * 6 + ["sliding_attention"] * 6,
    }
    # The head reads the states that it was trained with, of a target that has more layers now.
    assert config_of(wide / "eagle3")["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]


def test_prompts_are_long_and_end_as_the_pairs_own(pairs: tuple[Path, Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(SHIPPED / "target"))
    own = json.loads((SHIPPED / "prompts.json").read_text())
    for folder in pairs:
        found = json.loads((folder / "prompts.json").read_text())
        assert len(set(found)) == len(found) == 16
        lengths = [len(tokenizer(text)["input_ids"]) for text in found]
        assert PROMPT - 8 <= min(lengths) <= max(lengths) <= PROMPT
        assert all(text.endswith(end[-20:]) for text, end in zip(found, own))


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_windows_change_no_answer(pairs: tuple[Path, Path]) -> None:
    """vLLM sees the windows, where they are; the tree's answers are those of the other target."""
    loaded = [Pair.load(folder) for folder in pairs]
    prompts: list[Any] = [list(range(5 + i, 75 + i)) for i in range(2)]
    with loaded[0].engine(max_model_len=256) as llm:
        assert windows(llm) == ([0] * 12, [])
        expected = greedy(llm, prompts, TOKENS)
    with loaded[1].engine(nodes=7, max_model_len=256, disable_log_stats=False) as llm:
        assert windows(llm) == ([0] * 6 + [WINDOW] * 6, [0])
        assert greedy(llm, prompts, TOKENS) == expected
        assert spec_metrics(llm).accepted_tokens > 0
        assert model_runner(llm).model_config.max_model_len == 256


def windows(llm: Any) -> tuple[list[int], list[int]]:
    """The windows of the target's layers and of the draft's, as vLLM's layers have them."""
    runner = model_runner(llm)
    layers = runner.vllm_config.compilation_config.static_forward_context
    drafts = set(getattr(runner.speculator, "draft_attn_layer_names", ()))
    sizes = {
        name: window_of(layer.impl) for name, layer in layers.items() if hasattr(layer, "impl")
    }
    target = [size for name, size in sizes.items() if name not in drafts]
    return target, [sizes[name] for name in sorted(drafts)]


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(300)
def test_windows_of_layers_with_an_effect_change_answers(
    pairs: tuple[Path, Path], tmp_path: Path
) -> None:
    """Negative control."""
    windowed_pair.link(pairs[1] / "target", tmp_path / "target")
    kinds = ["sliding_attention"] * 6 + ["full_attention"] * 6
    windowed_pair.edit_config(tmp_path / "target", lambda config: config | {"layer_types": kinds})
    prompts: list[Any] = [list(range(5 + i, 75 + i)) for i in range(2)]
    found = []
    for folder in (pairs[0], tmp_path):
        with Pair(str(folder / "target"), "", []).engine(max_model_len=256) as llm:
            found.append(greedy(llm, prompts, TOKENS))
    assert found[0] != found[1]


def test_windows_are_for_layers_without_an_effect() -> None:
    config = {"num_hidden_layers": 7}
    kinds = windowed_pair.with_windows(config, 5, 4)["layer_types"]
    assert kinds == ["full_attention"] * 4 + ["sliding_attention"] * 3
    with pytest.raises(ValueError, match="another function"):
        windowed_pair.with_windows(config, 5, 5)


def test_rotations_are_stretched() -> None:
    plain = {"rope_theta": 500.0, "max_position_embeddings": 64}
    newer = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    found = windowed_pair.stretched(plain, 4096, 1024)
    assert found == windowed_pair.stretched(newer, 4096, 1024)
    assert found == {
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    }
