"""Real engines that draft trees of n-grams alone (``method: ngram``)."""

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from tests.support.engines.pairs import (
    Answer,
    Pair,
    Request,
    answer_all,
    counter,
    crowded,
    differing,
    scheduling,
)
from tests.support.references.ngram_reference import check_nodes, nodes_in, trie_of
from tests.support.references.tree_reference import finish_and_compare
from tests.support.watches import wrap
from vllm_graft.plan.memory import memory_of
from vllm_graft.spec_decode.drafters import tree_drafting
from vllm_graft.spec_decode.lookup import ngrams
from vllm_graft.testing import model_runner, spec_metrics

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

# The target goes on repeating these.
COPIED = ("pass\n" * 24, "# ---------------------------------\n" * 6, "import os, sys\n" * 12)
# The end of each has occurred before, with different tokens behind it.
TEXTS = (
    "import os\nimport sys\nimport os\nimport re\nimport os\nimport sys\nimport",
    "# --------------------\n# ----------\n# --------------------\n# ---",
)
NODES, MATCHES, DEPTH = 15, 4, 6
LENGTHS = {"prompt_lookup_min": 1, "prompt_lookup_max": 6}


def engine(pair: Pair, method: str = "ngram", **options: Any) -> AbstractContextManager[Any]:
    return pair.engine(method=method, speculative=LENGTHS, **options)


@pytest.fixture(scope="module")
def greedy() -> list[Request]:
    return [Request(text, {"max_tokens": 12, "temperature": 0}) for text in COPIED]


@pytest.fixture(scope="module")
def others(pair: Pair) -> list[Request]:
    """Seeds, a text that repeats nothing, and a penalty."""
    seeded = {"max_tokens": 8, "seed": 7, "temperature": 0.5}
    return [
        *(Request(text, seeded) for text in (*TEXTS, COPIED[0])),
        Request(pair.prompts[3], {"max_tokens": 8, "temperature": 0}),
        Request(TEXTS[0], {"max_tokens": 8, "temperature": 0, "repetition_penalty": 1.2}),
    ]


# The second prompt takes several steps, in which the first request has drafts.
BESIDE = [
    Request(text, {"max_tokens": 6, "temperature": 0}) for text in (TEXTS[0], "x = y + z\n" * 24)
]

Answers = tuple[list[Answer], list[Answer], list[Answer]]


@pytest.fixture(scope="module")
def right(pair: Pair, greedy: list[Request], others: list[Request]) -> Answers:
    with pair.engine() as llm:
        return answer_all(llm, greedy), answer_all(llm, others), answer_all(llm, BESIDE)


class Watch:
    """Compares each tree with one made by plain references from the same text."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compared = self.with_match = self.branching = 0
        self.rows: list[Any] = []
        wrap(
            monkeypatch,
            (ngrams, "match_ngrams", self.match),
            (ngrams, "insert_paths", self.insert),
            (tree_drafting, "finish_tree", finish_and_compare),
        )

    def match(self, original: Any, state: Any, texts: Any, lengths: Any, *args: Any) -> None:
        self.texts, self.lengths = texts, lengths
        original(state, texts, lengths, *args)

    def insert(
        self, original: Any, table: Any, state: Any, lengths: Any, slots: Any, num_reqs: int,
        *, first: int, depth: int, vocab_size: int,
    ) -> None:  # fmt: skip
        rates = state.rates.tolist()
        original(
            table, state, lengths, slots, num_reqs, first=first, depth=depth, vocab_size=vocab_size
        )
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                text = self.texts[slot, : int(self.lengths[slot])].tolist()
                trie = trie_of(text, state, rates, depth, vocab_size)
                check_nodes(nodes_in(table, row, first, state.matches, depth), trie)
                self.compared += 1
                self.with_match += bool(trie.owners)
                self.branching += len(set(trie.owners.values())) > 1


def test_answers_are_the_target_s(
    pair: Pair,
    greedy: list[Request],
    others: list[Request],
    right: Answers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunked prompts, shared prefixes, async scheduling, steps without drafts."""
    watch = Watch(monkeypatch)
    # Three requests at once get no drafts.
    options = crowded(3, tokens=48, ranges=[(1, 2, NODES), (3, 3, 0)])
    options["additional_config"] = {"graft": {"tree": {"nodes": NODES, "topk": MATCHES}}}
    with engine(pair, "ngram_gpu", chain=DEPTH, **options) as llm:
        assert not differing(answer_all(llm, greedy), right[0])
        length = spec_metrics(llm).acceptance_length
        with scheduling(llm) as seen:
            assert not differing(answer_all(llm, others), right[1])
            assert not differing(answer_all(llm, BESIDE), right[2])
        (info,) = llm.collective_rpc("graft_info")
        assert seen.prompt_chunks > 0
        assert seen.chunks_beside_drafts > 0
        assert counter(llm, "vllm:prefix_cache_hits") > 0
        numbers = {
            name: counter(llm, f"vllm:graft_tree_ngram_nodes_{name}")
            for name in ("verified", "accepted")
        }
    assert watch.branching > 5
    assert watch.compared > watch.with_match > watch.branching
    assert length > 2
    counted = info["counters"]["tree"]
    found = counted["ngrams"]
    assert found["nodes_verified"] > found["nodes_accepted"] > 15
    assert numbers == {name: found[f"nodes_{name}"] for name in numbers}
    assert counted["num_nodes"] == NODES
    assert counted["steps"] == DEPTH


@pytest.mark.nightly
def test_without_depths_tokens_differ(
    pair: Pair, greedy: list[Request], right: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control, in an engine that is right before: nodes get the position of the first."""
    with engine(pair, nodes=9, topk=3, steps=5, max_num_seqs=3) as llm:
        assert not differing(answer_all(llm, greedy[:1]), right[0][:1])
        finish_tree = tree_drafting.finish_tree

        def shallow(*args: Any, **kwargs: Any) -> None:
            finish_tree(*args, **kwargs)
            args[5].depths.clamp_(max=1)

        monkeypatch.setattr(tree_drafting, "finish_tree", shallow)
        assert differing(answer_all(llm, greedy), right[0])


def test_a_chain_is_the_best_match(
    pair: Pair, greedy: list[Request], right: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``topk: 1`` drafts what vLLM's own n-grams draft, which the target's layers verify."""
    from tests.support.references.ngram_reference import continuation, last_match

    with engine(pair, nodes=4, topk=1, max_num_seqs=3) as llm:
        speculator = model_runner(llm).speculator
        propose, texts = type(speculator).propose, model_runner(llm).req_states
        compared = []

        def watched(self: Any, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            drafts: torch.Tensor = propose(self, batch, *args, **kwargs)
            for row, slot in enumerate(batch.idx_mapping.tolist()):
                size = int(texts.total_len.gpu[slot])
                text = texts.all_token_ids.gpu[slot, :size].tolist()
                if found := last_match(text, 1, 6):
                    assert drafts[row].tolist() == continuation(text, found.start, 4)
                    compared.append(found)
            return drafts

        monkeypatch.setattr(type(speculator), "propose", watched)
        assert not differing(answer_all(llm, greedy), right[0])
        assert spec_metrics(llm).acceptance_length > 1.3
        planned = {row.what: row.num_bytes for row in memory_of(llm.llm_engine.vllm_config)[0]}
        (info,) = llm.collective_rpc("graft_info")
    assert planned["texts of the requests"] == info["counters"]["tree"]["ngrams"]["bytes"]
    assert "weights of the draft" not in planned
    assert len(compared) > 10


def test_without_our_section_vllm_drafts(pair: Pair) -> None:
    from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

    with engine(pair, chain=3) as llm:
        assert type(model_runner(llm).speculator) is NgramGPUSpeculator
