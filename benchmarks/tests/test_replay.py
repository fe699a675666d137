"""Replayed answers are what comes, and n-grams copy what an edit leaves."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from benchmarks.replay import Replay, replay
from benchmarks.speeds import read_arguments
from benchmarks.workloads.load import load_of
from tests.support.engines.pairs import Pair
from tests.support.engines.shipped_pair import SHIPPED
from vllm_graft.bench.common.closed_loop import Ask, Case, ClosedLoop


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
    replayed.answers[1, 3] = []
    replayed.add(1, [1, 3])
    assert drawn() == [1, 1, 1, 1, 1]
    with pytest.raises(RuntimeError, match="no answer to replay"):
        replayed.add(0, [5])


def told(*more: str) -> argparse.Namespace:
    return read_arguments([str(SHIPPED), "--max-model-len", "1024", "--tokens", "40", *more])


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(600)
def test_ngrams_copy_what_the_edit_leaves() -> None:
    """The answers that come are those that are replayed, in far fewer steps with n-grams."""
    from vllm_graft.testing import spec_metrics

    pair, load = Pair.load(SHIPPED), load_of(told("--characters", "240"), "edits", 2)
    lengths: dict[bool, float] = {}
    for ngram in (False, True):
        tree: dict[str, Any] = {"ngram": ngram}
        with pair.engine(nodes=15, topk=4, steps=3, tree=tree, max_num_seqs=2) as llm:
            assert llm.collective_rpc(replay, args=(load.answers,)) == [2]
            loop = ClosedLoop(llm, load.requests)
            found = loop.answers(Ask(Case(0.0, 1, 2, 40), margins=False))
            lengths[ngram] = spec_metrics(llm).acceptance_length
        wanted = [*load.answers.values()]
        # The first answer of a loop is shorter.
        assert [each.tokens for each in found] == [
            answer[: len(each.tokens)] for answer, each in zip(wanted, found)
        ]
        assert len(found[1].tokens) == len(wanted[1])
    assert lengths[True] > 2 * lengths[False], lengths


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_tool_calls_have_full_trees() -> None:
    """A session's calls are bound to the tools' schema, and each step verifies all nodes."""
    from tests.support.engines.pairs import counter

    pair, load = Pair.load(SHIPPED), load_of(told("--characters", "160"), "agent", 1)
    assert len({each.session for each in load.requests}) == 1
    tree: dict[str, Any] = {"ngram": {"reference": 0}}
    options: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 2}
    grammar = {"backend": "xgrammar", "disable_any_whitespace": True}
    options["structured_outputs_config"] = grammar
    with pair.engine(nodes=7, topk=2, steps=4, tree=tree, **options) as llm:
        # The second request has the first one's call in its prompt.
        ask = Ask(Case(0.0, 1, 1, 20, first=1), margins=False)
        loop = ClosedLoop(llm, load.requests)
        [found] = loop.answers(ask)
        text = llm.get_tokenizer().decode(found.tokens)
        counted = {
            name: counter(llm, f"vllm:graft_tree_{name}")
            for name in ("trees", "nodes_verified", "nodes_accepted")
        }
        # What is replayed is what the schema permits.
        llm.collective_rpc(replay, args=(load.answers,))
        [replayed] = loop.answers(ask)
    assert replayed.tokens == [*load.answers.values()][1][:20] != found.tokens
    assert text.replace(" ", "").startswith('{"name":"')
    assert counted["trees"] > 0
    assert counted["nodes_verified"] == 7 * counted["trees"]
    assert counted["nodes_accepted"] > 0
