"""What a vocabulary holds of answers whose tokens are known."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import torch

from benchmarks import hot_coverage
from benchmarks.hot_coverage import Request, read_requests, read_tokenizer, simulate
from vllm_graft.bench.common.report import BenchmarkError
from vllm_graft.spec_decode.heads import hot_vocabulary

VOCABULARY, SIZE = 400, 40
PERIOD, LATE = 8, 2


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_vocabulary, "PERIOD", PERIOD)
    monkeypatch.setattr(hot_vocabulary, "LATE", LATE)


def texts(first: int, kinds: int, count: int) -> list[Request]:
    """Requests whose answers are 30 random ones of so many tokens."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(kinds, (count, 30), generator=generator) + first
    return [Request(torch.arange(5), answer) for answer in drawn]


@pytest.mark.parametrize("batch", [1, 4])
def test_a_text_of_few_tokens_is_held_once_it_was_seen(batch: int) -> None:
    found = simulate(texts(300, 30, 100), VOCABULARY, SIZE, batch, accepted=3)
    # All requests take ten steps, so that they end together.
    assert (found.steps, found.emitted) == (1000 // batch, 3000)
    # Nothing is held, and the vocabulary is not used, before the first choice.
    unseen = found.emitted - found.held
    assert 3 * batch * PERIOD <= unseen < 3 * batch * PERIOD + 100
    assert 0 < found.used <= found.steps - PERIOD
    assert found.held_used > 0.99 * found.emitted_used > 0


def test_a_shuffled_text_of_all_tokens_is_not_held() -> None:
    found = simulate(texts(0, VOCABULARY, 100), VOCABULARY, SIZE, 4, accepted=3)
    share = SIZE / VOCABULARY
    assert abs(found.held / found.emitted - share) < 4 * (share * (1 - share) / 3000) ** 0.5
    assert found.used == found.emitted_used == 0
    assert found.row()[-3:] == [f"{found.held / 3000:.2%}", "0.00%", "-"]


def test_requests_follow_each_other() -> None:
    lengths = [7, 1, 2, 4, 9]
    requests = [Request(torch.arange(2), torch.full((length,), SIZE)) for length in lengths]
    # Steps of 3 take 3, 1, 1, 2 and 3 steps. The second one's place goes to the third, and so on.
    found = simulate(requests, VOCABULARY, SIZE, 2, accepted=3)
    emitted = [3 + 1, 3 + 2, 1 + 3, 3 + 1, 3]
    # The last one is alone, which is not the batch that was asked for.
    assert (found.steps, found.emitted) == (4, sum(emitted[:-1]))
    with pytest.raises(BenchmarkError, match="--batch 6: there are 5 requests"):
        simulate(requests, VOCABULARY, SIZE, 6, accepted=3)


def test_prompts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[int]] = []
    vocabulary = hot_vocabulary.HotVocabulary
    monkeypatch.setattr(vocabulary, "read", lambda _, tokens: read.append(tokens.tolist()))
    requests = [Request(torch.tensor([7, place]), torch.tensor([1])) for place in range(3)]
    simulate(requests, VOCABULARY, SIZE, 1, accepted=1)
    assert read == [[7, 0], [7, 1], [7, 2]]


def test_what_it_must_hold_says_when_it_is_used() -> None:
    requests = texts(0, VOCABULARY, 100)
    strict, easy = (simulate(requests, VOCABULARY, SIZE, 4, 3, least) for least in (0.98, 0.01))
    assert strict.used == 0
    assert easy.used > easy.steps // 2
    assert easy.held == strict.held


def test_answers_are_requests_behind_all_that_was_said() -> None:
    turns = [("gpt", "ab"), ("human", "c"), ("gpt", ""), ("gpt", "de"), ("human", "f")]
    said = {"conversations": [{"from": who, "value": value} for who, value in turns]}
    [request] = read_requests([said], lambda text: [ord(letter) for letter in text])
    assert bytes(request.prompt.tolist()) == b"abc"
    assert bytes(request.answer.tolist()) == b"de"


def test_a_file_of_merges_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = [bytes([byte]) for byte in range(256)] + [b"he", b"12"]
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    (merges := tmp_path / "qwen.tiktoken").write_bytes(b"\n".join(lines))
    encode, vocab_size = read_tokenizer(merges)
    assert vocab_size == 258
    # Digits are single, whatever could be merged.
    assert encode("he 12") == [256, 32, *b"12"]
    turns = [{"from": "human", "value": "he"}, {"from": "gpt", "value": "hehehe 12"}]
    (talk := tmp_path / "talk.json").write_text(json.dumps([{"conversations": turns}]))
    command = [str(talk), str(merges), "--batch", "1"]
    assert hot_coverage.main([*command, "--sizes", "40", "--json", str(tmp_path / "out")]) == 0
    # A space is among the first 40 tokens; two steps of three tokens each were made.
    assert "| 40 | 1 | 6 | 16.67% | 0.00% | - |" in capsys.readouterr().out
    [found] = json.loads((tmp_path / "out").read_text())
    assert (found["held"], found["emitted"]) == (1, 6)
    for wrong, words in (("258", "the tokenizer has 258 tokens"), ("0", "--sizes 0")):
        with pytest.raises(SystemExit):
            hot_coverage.main([*command, "--sizes", wrong])
        assert words in capsys.readouterr().err
