"""A model in parts that travel, a head that comes back, and what is asked, without a network."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.real_pair import pretrained, quantised, workloads
from benchmarks.real_pair.conversations import is_held_out
from benchmarks.real_pair.packing import expand_head, pack_head
from benchmarks.real_pair.quantised import FLOATS, Source
from benchmarks.real_pair.targets import Target
from vllm_graft.bench.common.report import BenchmarkError
from vllm_graft.train.draft_head import Head, read_head, save_head

SHAPES = {"model.embed_tokens.weight": (40, 6), "model.norm.weight": (6,), "x.weight": (5, 8)}


def some_sources() -> tuple[dict[str, Source], dict[str, torch.Tensor]]:
    """Tensors as a GGUF file has them, and what a checkpoint should have."""
    random = np.random.default_rng(0)
    found, wanted = {}, {}
    for name, shape in SHAPES.items():
        values = random.standard_normal(shape, dtype=np.float32)
        rows = values.reshape(shape[0] if len(shape) > 1 else 1, -1).view(np.uint8)
        found[name] = Source(rows, FLOATS, shape)
        wanted[name] = torch.from_numpy(values).bfloat16()
    return found, wanted


def test_parts_make_the_checkpoint_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, wanted = some_sources()
    monkeypatch.setattr(quantised, "sources", lambda gguf: found)
    parts = quantised.write_parts(Path("x.gguf"), tmp_path / "parts", tmp_path, 200)
    assert len(parts) > 5
    # The embedding is larger than a part.
    assert sum("embed" in key for part in parts for key in load_file(part)) > 3
    quantised.put_all(parts[::-1], tmp_path)
    stored = load_file(tmp_path / quantised.CHECKPOINT)
    assert stored.keys() == wanted.keys()
    for name, values in wanted.items():
        assert torch.equal(stored[name], values), name
    quantised.seal(tmp_path)
    quantised.check(tmp_path)
    # Elsewhere, one by one.
    other = tmp_path / "other"
    other.mkdir()
    (other / quantised.LAYOUT).write_text((tmp_path / quantised.LAYOUT).read_text())
    for part in parts[1:]:
        quantised.put(part, other)
    with pytest.raises(BenchmarkError, match="a part is missing"):
        quantised.check(other)
    quantised.put(parts[0], other)
    quantised.check(other)


def test_tensors_have_the_names_of_a_checkpoint() -> None:
    name = quantised.checkpoint_name
    assert name("token_embd.weight") == "model.embed_tokens.weight"
    assert name("blk.12.attn_q.bias") == "model.layers.12.self_attn.q_proj.bias"
    with pytest.raises(BenchmarkError, match=r"'blk\.0\.ssm_a\.weight'"):
        name("blk.0.ssm_a.weight")


def test_an_output_layer_that_is_the_embedding_is_known_by_its_rows() -> None:
    random = np.random.default_rng(0)
    values = random.standard_normal((300, 8), dtype=np.float32)
    one, rounded, other = (
        Source(each.astype(np.float32).view(np.uint8), FLOATS, each.shape)
        for each in (values, (values * 8).round() / 8, random.standard_normal((300, 8)))
    )
    assert quantised._same(one, rounded)
    assert not quantised._same(one, other)


def test_rows_that_rope_rotates_together_are_half_a_head_apart() -> None:
    side_by_side = np.arange(8, dtype=np.uint8)[:, None]
    assert quantised._halves(side_by_side, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_another_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reader(file: str) -> Any:
        told = {"general.name": "Some 1B Model"}
        return SimpleNamespace(
            fields={key: SimpleNamespace(contents=lambda v=value: v) for key, value in told.items()}
        )

    monkeypatch.setitem(sys.modules, "gguf", SimpleNamespace(GGUFReader=reader))
    with pytest.raises(BenchmarkError, match="'Some 1B Model', not 'Other'"):
        pretrained.convert(tmp_path / "x.gguf", tmp_path / "target", Target((), "Other"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(BenchmarkError, match="pip install gguf"):
        pretrained.convert(tmp_path / "x.gguf", tmp_path / "target", Target(()))


def test_a_head_comes_back_nearly_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 90,
    }
    config |= {"hidden_size": 32, "intermediate_size": 48, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
    config |= {"draft_vocab_size": 40, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    head = Head(config)
    save_head(head, torch.arange(0, 80, 2), tmp_path / "eagle3")
    pack_head(tmp_path / "eagle3", tmp_path / "head.safetensors")
    expand_head(tmp_path / "head.safetensors", tmp_path / "back")
    assert read_head(tmp_path / "back")[0].config == head.config
    sent, found = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("eagle3", "back")
    )
    assert sent.keys() == found.keys()
    for name, each in sent.items():
        assert found[name].dtype == each.dtype
        rough = each.ndim == 2
        bound = each.float().abs().max() / 127 if rough else 0
        assert (found[name].float() - each.float()).abs().max() <= bound, name
        assert torch.equal(found[name], each) != rough, name


# --- workloads ----------------------------------------------------------------------------------

SOURCE = '''
import os

def plain(a):
    """Too short to ask for."""
    return a

def told(a, b=2):
    """Return what is said here, at some length, about both."""
    return (a,
            b)
'''


def words(text: str) -> dict[str, list[str]]:
    return {"input_ids": text.split()}


def test_functions_are_asked_without_their_bodies(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "test").mkdir()
    (tmp_path / "test/module.py").write_text(SOURCE)
    [only] = workloads.functions(9, tmp_path)
    asked, answer = (turn["value"] for turn in only["conversations"])
    assert "def told(a, b=2):" in asked
    assert "return (a, b)" not in asked
    assert "return (a, b)" in answer


def test_functions_go_among_what_is_trained_on(tmp_path: Path) -> None:
    lines = [SOURCE.replace("told", f"told_{number}") for number in range(64)]
    (tmp_path / "module.py").write_text("".join(lines))
    found = workloads.functions(60, tmp_path)
    assert len(found) == 60
    assert found == workloads.functions(60, tmp_path)
    held_out = [each for each in found if is_held_out(each)]
    assert held_out
    # A question comes once.
    mixed = workloads.mixed([found[0]], found)
    assert len(mixed) == 60 - len(held_out)
    assert not any(map(is_held_out, mixed))


def test_requests_are_kept_as_the_serving_benchmark_reads_them(tmp_path: Path) -> None:
    turns = [
        [{"from": "human", "value": "what is this good for?"}, {"from": "gpt", "value": answer}]
        for answer in ("it is for measuring", "no")
    ]
    pretrained.write_conversations(tmp_path, [], [{"conversations": each} for each in turns])
    (tmp_path / "humaneval.json").write_text(json.dumps(["def f():\n"]))
    # An answer of one word says nothing about speed.
    assert list(workloads.chat(tmp_path, words)) == [("what is this good for?", 4)]
    [(task, most)] = workloads.human_eval(tmp_path, words)
    assert task.endswith("```python\ndef f():\n```")
    workloads.write_requests([(task, most)], tmp_path / "x.jsonl")
    assert json.loads((tmp_path / "x.jsonl").read_text()) == {"prompt": task, "output_tokens": most}
