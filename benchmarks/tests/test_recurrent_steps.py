"""The target whose steps are timed: small here, of the same kinds of layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from benchmarks import recurrent_steps


@pytest.mark.parametrize("shape", recurrent_steps.SHAPES)
def test_a_small_target_is_written(shape: str, tmp_path: Path) -> None:
    command = [str(tmp_path), "--tiny", "--shape", shape, "--layers", "8"]
    assert recurrent_steps.main(command) == 0
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert config["num_hidden_layers"] == 8
    dense = shape != "qwen3-next"
    assert config["mtp_num_hidden_layers" if dense else "num_nextn_predict_layers"] == 1
    with safe_open(str(tmp_path / "target" / "model.safetensors"), "pt") as file:
        names = set(file.keys())
    assert "mtp.fc.weight" in names
    assert "model.layers.0.linear_attn.A_log" in names
    assert "mtp.layers.0.self_attn.q_proj.weight" in names
    assert ("mtp.layers.0.mlp.gate_proj.weight" in names) == dense
    prompts = json.loads((tmp_path / "prompts.json").read_text())
    assert len(prompts) > 32
    assert all(len(text) == 2000 for text in prompts)
    # Three of four layers of the large one are recurrent, the last one is not.
    _, sizes = recurrent_steps.SHAPES[shape]
    kinds = sizes["kinds"]
    assert sizes["layers"] % len(kinds) == 0
    assert kinds[-1] == "full_attention"


def test_a_target_with_hot_tokens_is_written(tmp_path: Path) -> None:
    # The text has 1000 - 554 tokens.
    given = ["--hot-tokens", "1000", "--hot-share", "0.9"]
    command = [str(tmp_path), "--tiny", "--shape", "qwen3.5-9b", *given]
    assert recurrent_steps.main(command) == 0
    with safe_open(str(tmp_path / "target" / "model.safetensors"), "pt") as file:
        seen = file.get_tensor("model.embed_tokens.weight")
        head = file.get_tensor("lm_head.weight")
    table = (seen.float() @ head.float().T).argmax(1)
    text = table.unique()
    assert len(text) == 1000 - 554
    assert int((text < 1000).sum()) == round(0.9 * len(text))
    prompts = json.loads((tmp_path / "prompts.json").read_text())
    tokenizer = Tokenizer.from_file(str(tmp_path / "target" / "tokenizer.json"))
    for length in (50, 2000):
        rows = [tokenizer.encode(prompt[:length]).ids for prompt in prompts]
        assert {len(row) for row in rows} == {length}
        # All end differently, and the text has none of their tokens.
        assert len({row[-1] for row in rows}) == len(prompts)
        assert not torch.isin(torch.tensor(rows), text).any()
        # Prompts in turn begin side by side.
        ring = [int(table[rows[0][-1]])]
        while len(ring) < 193:
            ring.append(int(table[ring[-1]]))
        assert int(table[rows[1][-1]]) == ring[192]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--hot-tokens", "1000"], "say both or none"),
        (["--hot-share", "0"], "say both or none"),
        (["--hot-tokens", "1000", "--hot-share", "0", "--random"], "drop --hot-tokens"),
        (["--layers", "6"], "a multiple of 4"),
    ],
)
def test_contradicting_options_write_nothing(
    given: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        recurrent_steps.main([str(tmp_path / "out"), "--tiny", *given])
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
