"""The target whose steps are timed: small here, of the same kinds of layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from benchmarks import recurrent_steps


@pytest.mark.parametrize("shape", recurrent_steps.SHAPES)
def test_a_small_target_is_written(shape: str, tmp_path: Path) -> None:
    assert recurrent_steps.main([str(tmp_path), "--tiny", "--shape", shape]) == 0
    config = json.loads((tmp_path / "target" / "config.json").read_text())
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
