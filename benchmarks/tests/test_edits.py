"""Edits of source files whose answers are replayed: what is asked, and that it is what comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.edits import Replay, answers_to, edits, replay
from tests.support.engines.pairs import Pair, Request, answer_all
from vllm_graft.bench.common.report import BenchmarkError

PAIR = Pair.load(Path(__file__).resolve().parents[2] / "tests" / "pair")


def test_an_edit_renames_a_name() -> None:
    found = edits(6, 500)
    assert found == edits(6, 500)
    assert len({edit.prompt for edit in found}) == 6
    for edit in found:
        part, _, ask = edit.prompt.partition("\n# The same code, with ")
        old, _, new = ask.removesuffix(":\n").partition(" renamed to ")
        assert old in part
        assert new not in part
        assert edit.answer != part
        assert edit.answer.replace(new, old) == part
    with pytest.raises(BenchmarkError, match="modules have 500 characters"):
        edits(10_000, 500)


def test_draws_are_replaced_while_the_answer_lasts() -> None:
    replayed = Replay({(5, 6): [7, 8, 9]}, 2, 4, torch.device("cpu"))
    replayed.add(1, [5, 6])
    # Slot 0 has no answer, and nothing is replaced within the prompt.
    slots, positions = torch.tensor([1, 1, 1, 0, 1]), torch.tensor([1, 2, 3, 2, 0])

    def drawn() -> list[int]:
        logits = torch.zeros(5, 10, dtype=torch.bfloat16)
        logits[:, 1] = 9
        replayed.force(logits, slots, positions)
        found: list[int] = logits.argmax(1).tolist()
        return found

    assert drawn() == [7, 8, 9, 1, 1]
    replayed.answers[1, 2] = [3]
    replayed.add(1, [1, 2])
    assert drawn() == [3, 1, 1, 1, 1]
    with pytest.raises(RuntimeError, match="no answer to replay"):
        replayed.add(0, [5])


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(600)
def test_ngrams_copy_what_the_edit_leaves() -> None:
    """The answers that come are those that are replayed, in far fewer steps with n-grams."""
    from transformers import AutoTokenizer

    from vllm_graft.testing import spec_metrics

    cases = edits(2, 240)
    answers = answers_to(cases, AutoTokenizer.from_pretrained(PAIR.target))
    wanted = [tokens[:40] for tokens in answers.values()]
    requests = [
        Request(case.prompt, {"max_tokens": 40, **kind})
        for case, kind in zip(cases, ({"temperature": 0}, {"seed": 3}))
    ]
    lengths: dict[bool, float] = {}
    for ngram in (False, True):
        tree: dict[str, Any] = {"ngram": ngram}
        with PAIR.engine(nodes=15, topk=4, steps=3, tree=tree, max_num_seqs=2) as llm:
            assert llm.collective_rpc(replay, args=(answers,)) == [2]
            found = [answer.tokens[0] for answer in answer_all(llm, requests)]
            lengths[ngram] = spec_metrics(llm).acceptance_length
        assert found == wanted
    assert lengths[True] > 2 * lengths[False], lengths
