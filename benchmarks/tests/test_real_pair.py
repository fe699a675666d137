"""The real pair's parts on tiny models: conversations and widening."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.real_pair import conversations, widening
from benchmarks.tests.small_targets import with_norms, write_target
from vllm_graft.train.draft_head import Head, read_head, save_head

CPU = torch.device("cpu")


def conversation(*values: str, first: str = "human", name: str = "a") -> dict[str, Any]:
    other = {"human": "gpt", "gpt": "human"}
    turns, speaker = [], first
    for value in values:
        turns.append({"from": speaker, "value": value})
        speaker = other[speaker]
    return {"id": name, "conversations": turns}


# --- conversations ------------------------------------------------------------------------------


def test_a_cut_file_is_read_up_to_its_last_whole_conversation() -> None:
    all_ = [conversation(f'question {i}, with "marks" and }}]', "an answer") for i in range(4)]
    text = json.dumps(all_, indent=1)
    assert list(conversations.whole(text)) == all_
    for cut in (1, 3, 40):
        assert list(conversations.whole(text[:-cut])) == all_[: 4 if cut == 1 else 3]
    assert list(conversations.whole("[")) == []
    with pytest.raises(ValueError, match="begins"):
        list(conversations.whole("{}"))


def test_turns_that_do_not_do_end_a_conversation() -> None:
    good = ("what is this?", "an answer it is")
    assert conversations.usable(conversation(*good)) == conversation(*good)
    # The part of a longer one begins with an answer; a question at the end has none.
    part = conversations.usable(conversation("the answer before", *good, "and then?", first="gpt"))
    assert part == conversation(*good)
    long = "x" * (conversations.MOST_CHARACTERS + 1)
    for bad in (long, "?", "\u4f60\u597d\u4f60\u597d\u4f60\u597d\u4f60\u597d", "\u0434\u0430" * 5):
        assert conversations.usable(conversation(bad, "an answer it is")) is None
        kept = conversations.usable(conversation(*good, "and another?", bad))
        assert kept == conversation(*good)
    assert conversations.usable(conversation("it\u2019s \u201cquoted\u201d", "an answer it is"))


def test_questions_come_once_and_on_one_side() -> None:
    all_ = [conversation(f"question {i % 300}", f"answer number {i}") for i in range(400)]
    train, held_out = conversations.split(json.dumps(all_), 10**6)
    asked = [conversations.first_prompt(each) for each in train + held_out]
    assert len(set(asked)) == len(asked) == 300
    assert 5 <= len(held_out) <= 40
    assert all(map(conversations.is_held_out, held_out))
    assert not any(map(conversations.is_held_out, train))
    fewer = conversations.split(json.dumps(all_), 100)
    assert len(fewer[0] + fewer[1]) == 100


# --- widening -----------------------------------------------------------------------------------

SMALL = widening.Shape(48, 80, 6, 2, 16, 6, 96, 40)
WIDE = widening.Shape(128, 192, 16, 4, 32, 7, 160, 64)


def small_pair(folder: Path) -> None:
    """A random target with tied embeddings, and a random head."""
    write_target(folder / "target", SMALL, tied=True)
    config = json.loads((folder / "target/config.json").read_text())
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": SMALL.draft_vocab,
        "eagle_aux_hidden_state_layer_ids": [2, 3, 3],
    }
    head = Head(config)
    with_norms(head)
    save_head(head, torch.arange(0, 80, 2), folder / "eagle3")


def logits_of(folder: Path, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The target's logits, its states that the head reads, and the head's logits of two passes."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(str(folder / "target"), dtype=torch.float32).eval()
    head, _ = read_head(folder / "eagle3")
    with torch.no_grad():
        found = model(tokens, output_hidden_states=True)
        aux = torch.cat([found.hidden_states[layer][:, :-1] for layer in (2, 3, 3)], -1)
        embeds = model.get_input_embeddings()(tokens[:, 1:])
        drafted = torch.stack([head.lm_head(states) for states in head(aux, embeds, 2)])
    return found.logits, aux, drafted


@pytest.fixture(scope="module")
def widened(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    small, wide = (tmp_path_factory.mktemp(name) for name in ("small", "wide"))
    small_pair(small)
    # In bfloat16, which is what is served, scaled weights are rounded anew.
    widening.widen_target(small, wide, WIDE, CPU, torch.float32)
    widening.widen_draft(small, wide, WIDE, CPU, torch.float32)
    return small, wide


def test_a_wide_pair_computes_what_the_small_one_does(widened: tuple[Path, Path]) -> None:
    tokens = torch.randint(0, SMALL.vocab, (3, 24))
    (logits, _, drafted), (wide, _, wide_drafted) = (logits_of(each, tokens) for each in widened)
    for old, new, tokens_of in (
        (logits, wide, SMALL.vocab),
        (drafted, wide_drafted, SMALL.draft_vocab),
    ):
        difference = (new[..., :tokens_of] - old).abs().max() / old.std()
        assert difference < 1e-3, difference
        assert new[..., 1:, tokens_of:].max() < old.min() - 100
    assert torch.equal(logits.argmax(-1), wide.argmax(-1))


def test_the_wide_pair_is_compared_for_real(widened: tuple[Path, Path]) -> None:
    """The logits differ without the scale of queries, or with other rotations."""
    small, wide = widened
    tokens = torch.randint(0, SMALL.vocab, (3, 24))
    logits = logits_of(small, tokens)[0]
    config = json.loads((wide / "target/config.json").read_text())
    for key, value in (
        ("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0}),
        ("rms_norm_eps", 0.1),
    ):
        (wide / "target/config.json").write_text(json.dumps(config | {key: value}))
        spoiled = logits_of(wide, tokens)[0][..., : SMALL.vocab]
        assert (spoiled - logits).abs().max() / logits.std() > 0.2, key
    (wide / "target/config.json").write_text(json.dumps(config))


def test_added_tokens_of_the_draft_stand_for_added_tokens(widened: tuple[Path, Path]) -> None:
    small, ids = read_head(widened[0] / "eagle3")
    wide, wide_ids = read_head(widened[1] / "eagle3")
    assert torch.equal(wide_ids[: len(ids)], ids)
    added = wide_ids[len(ids) :].tolist()
    assert added == list(range(SMALL.vocab, SMALL.vocab + len(added)))
    for head, shape in ((small, SMALL), (wide, WIDE)):
        assert head.config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 3]
        assert head.config["hidden_size"] == shape.hidden


def test_a_head_that_names_no_layers_reads_those_of_the_small_target(
    widened: tuple[Path, Path], tmp_path: Path
) -> None:
    for part in ("target", "eagle3"):
        shutil.copytree(widened[0] / part, tmp_path / "small" / part)
    file = tmp_path / "small/eagle3/config.json"
    config = json.loads(file.read_text())
    assert config.pop("eagle_aux_hidden_state_layer_ids") == [2, 3, 3]
    file.write_text(json.dumps(config))
    widening.widen_draft(tmp_path / "small", tmp_path / "wide", WIDE, CPU)
    found = json.loads((tmp_path / "wide/eagle3/config.json").read_text())
    # By the wide target's seven layers they would be 2, 3 and 4.
    assert found["eagle_aux_hidden_state_layer_ids"] == [2, 3, 3]


def test_a_shape_that_does_not_fit_is_refused() -> None:
    for wrong in (replace(WIDE, hidden=40), replace(WIDE, heads=8), replace(WIDE, head=24)):
        with pytest.raises(ValueError, match="can't be widened"):
            widening.Widening(SMALL, wrong, CPU)


def test_a_head_in_the_form_of_speculators_is_widened_likewise(
    widened: tuple[Path, Path], tmp_path: Path
) -> None:
    flat = json.loads((widened[0] / "eagle3/config.json").read_text())
    names = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    form = {"norm_before_residual": False, **{name: flat[name] for name in names}}
    form["transformer_layer_config"] = {**flat, "architectures": ["None"]}
    (tmp_path / "config.json").write_text(json.dumps(form))
    assert widening.head_config(tmp_path) == flat | {"norm_before_residual": False}
