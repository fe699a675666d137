"""Steps without an engine accept what trees over written texts do."""

from __future__ import annotations

import pytest
import torch

from benchmarks.acceptance_rules import __main__ as program
from benchmarks.acceptance_rules.decoding import Setting, Texts, lengths_of
from benchmarks.acceptance_rules.growth import Chance
from benchmarks.pair_models import Head, Llama, read_weights, write
from benchmarks.tree_lengths import measure, read_prompts
from tests.support.shipped_pair import SHIPPED
from vllm_graft.spec_decode.trees.shape import TreeShape

TEXTS, TOKENS = 3, 24
COLD = 1e-4
"""A temperature at which all rules are greedy."""


def hops(lengths: list[int]) -> list[int]:
    """The lengths at those places of a text where a tree grows."""
    found, place = [], 0
    while place < len(lengths):
        found.append(lengths[place])
        place += lengths[place]
    return found


@pytest.mark.parametrize("rule", ["recursive", "traversal", "coupling"])
def test_cold_chains_are_the_greedy_ones(rule: str) -> None:
    shape = TreeShape(1, 4, 4)
    with torch.inference_mode():
        target, draft = Llama(SHIPPED), read_weights(SHIPPED / "eagle3")
        prompts = read_prompts(SHIPPED, TEXTS, 20)
        setting = Setting(rule, shape, COLD, 1.0, Chance(0.8, 0.2))
        found = lengths_of(Texts(target, draft, prompts, TOKENS, setting), TOKENS)
        for text, lengths in zip(write(target, prompts, TOKENS + 12, 0.0), found, strict=True):
            [wanted] = measure(Head(draft, target, text), [(1, 4, 4)], 0.0, 1.0)
            assert hops(wanted)[: len(lengths)] == lengths
    assert len({length for lengths in found for length in lengths}) > 1


def test_all_rules_are_compared_at_the_same_places(capsys: pytest.CaptureFixture[str]) -> None:
    given = [str(SHIPPED), "--texts", "3", "--prompt", "20", "--tokens", "24", "--stride", "3"]
    given += ["--temperature", str(COLD), "--shapes", "1,4,4", "1,4,2", "--children"]
    given += ["--sharpness", "1", "--rules", "rejection", "block", "blind"]
    assert program.main(given) == 0
    tokens, gains = capsys.readouterr().out.split("Per cent over coupled 1:")
    for line in tokens.strip().splitlines()[2:]:
        values = line.split("|")[3:-1]
        assert len(values) == 4
        assert len(set(values)) == 1
        assert float(values[0].split()[0]) > 1
    assert gains.count("+0.0 ± 0.0") == 6


def test_tokens_per_step_and_their_error() -> None:
    # Four texts of two steps: 3, 3, 5 and 5 tokens, two or two and a half in each step.
    value, error = program.mean([[1, 2], [2, 1], [2, 3], [4, 1]])
    assert value == 2.0
    # Texts' means are 1.5, 1.5, 2.5 and 2.5.
    assert error == pytest.approx((4 * 0.25 / 3) ** 0.5 / 2)
    # Against itself the texts' own spread cancels out, and against another it stays.
    more = [[1, 2, 1], [2, 1, 1], [2, 3, 2], [4, 1, 2]]
    assert program.gain(more, more) == (0.0, 0.0)
    value, error = program.gain([[1], [1], [3], [3]], [[2], [2], [2], [2]])
    assert value == pytest.approx(0.0)
    assert error == pytest.approx(100 * (4 * 0.25 / 3) ** 0.5 / 2)
    twice, _ = program.gain([[4, 4], [6, 2]], [[2, 2], [3, 1]])
    assert twice == pytest.approx(100)


def test_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--texts", "2", "--prompt", "16", "--tokens", "16", "--temperature", "1"]
    given += ["--shapes", "2,3,4", "--rules", "rejection", "block", "blind", "--sharpness", "1"]
    given += ["--children", "1", "4", "--contexts", "3", "--draws", "64"]
    assert program.main([str(SHIPPED), *given]) == 0
    trees, nodes = capsys.readouterr().out.strip().split("| temperature | sharpness")
    trees, gains = trees.split("Per cent over coupled 1:")
    assert gains.count(" ± ") == 3
    *_, row = trees.strip().splitlines()
    values = [float(cell.split()[0]) for cell in row.split("|")[3:-1]]
    assert len(values) == 4
    assert all(1 <= value <= 4 for value in values)
    for line in nodes.strip().splitlines()[2:]:
        one, four = (float(cell.split()[0]) for cell in line.split("|")[-3:-1])
        assert "coupled" in line or one <= four


def test_a_prompt_that_is_too_long_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([str(SHIPPED), "--prompt", "100000"]) == 1
    assert "--prompt 100000: no prompt" in capsys.readouterr().err
