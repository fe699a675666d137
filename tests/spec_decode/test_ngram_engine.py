"""Real engines whose trees hold n-grams of the requests' own texts."""

from typing import Any

import pytest

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
from tests.support.references.ngram_reference import Candidates, continuation, last_match
from tests.support.references.tree_reference import finish_and_compare
from tests.support.watches import wrap
from vllm_graft.spec_decode.drafters import tree_drafting
from vllm_graft.spec_decode.lookup import ngrams
from vllm_graft.testing import spec_metrics

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

COPIED = ("pass\n" * 24, "# ---------------------------------\n" * 6, "import os, sys\n" * 12)
NODES, TOPK, STEPS = 15, 4, 3
TREE: dict[str, Any] = {"nodes": NODES, "topk": TOPK, "steps": STEPS}
NGRAM = {"min": 2, "max": 8}
THINKING: dict[str, Any] = {
    "reasoning_config": {"reasoning_start_str": " hereby", "reasoning_end_str": " return self"}
}
# Four requests at once get no drafts.
CROWDED = crowded(ranges=[(1, 3, NODES), (4, 4, 0)], **THINKING)


@pytest.fixture(scope="module")
def copies() -> list[Request]:
    """Texts that the target goes on repeating."""
    return [Request(text, {"max_tokens": 24, "temperature": 0}) for text in COPIED]


@pytest.fixture(scope="module")
def others(pair: Pair) -> list[Request]:
    """The same prompts with seeds, a text that repeats nothing, and a thinking budget."""
    seeded = {"max_tokens": 12, "seed": 7, "temperature": 0.3}
    thinking = {"max_tokens": 8, "temperature": 0, "thinking_token_budget": 4}
    return [
        *(Request(text, seeded) for text in COPIED),
        Request(pair.prompts[3], {"max_tokens": 8, "temperature": 0}),
        Request(COPIED[0], thinking),
    ]


Answers = tuple[list[Answer], list[Answer]]


@pytest.fixture(scope="module")
def right(pair: Pair, copies: list[Request], others: list[Request]) -> Answers:
    with pair.engine(**THINKING) as llm:
        return answer_all(llm, copies), answer_all(llm, others)


@pytest.fixture(scope="module")
def tree_alone(pair: Pair, copies: list[Request], right: Answers) -> float:
    """Acceptance length of the same trees without n-grams, where texts are copied."""
    with pair.engine(**TREE, **CROWDED) as llm:
        assert not differing(answer_all(llm, copies), right[0])
        return spec_metrics(llm).acceptance_length


COUNTED = ("verified", "accepted")


class Watch:
    """Compares each tree with one made by plain references from the same candidates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compared = self.with_match = self.deepest = 0
        self.before: Any = None
        wrap(
            monkeypatch,
            (ngrams, "match_ngrams", self.match),
            (ngrams, "insert_ngrams", self.insert),
            (tree_drafting, "finish_tree", self.finish),
        )

    def match(self, original: Any, state: Any, texts: Any, lengths: Any, *args: Any) -> None:
        self.texts, self.lengths = texts, lengths
        original(state, texts, lengths, *args)

    def insert(self, original: Any, table: Any, state: Any, *args: Any, **options: Any) -> None:
        kept = (table.scores.tolist(), table.tokens.tolist(), table.parents.tolist())
        self.before, self.options = kept, options
        self.state, self.rates = state, state.rates.tolist()
        original(table, state, *args, **options)

    def finish(self, original: Any, table: Any, num_reqs: int, *args: Any, **extra: Any) -> None:
        *_, slots, tree, _ = args
        finish_and_compare(original, table, num_reqs, *args, **extra)
        for row, slot in enumerate(slots.tolist()[:num_reqs]):
            if slot >= 0:
                self._compare(row, slot, table)
                self.deepest = max(self.deepest, int(tree.depths[slot].max()))

    def _compare(self, row: int, slot: int, table: Any) -> None:
        text = self.texts[slot, : int(self.lengths[slot])].tolist()
        found = last_match(text, self.state.min_n, self.state.max_n)
        options = {key: self.options[key] for key in ("levels", "first", "depth")}
        expected = Candidates(*(each[row] for each in self.before))
        path = continuation(text, found.start, options["depth"]) if found else []
        rate = self.rates[found.length] if found else 1.0
        expected.insert(path, rate, topk=TOPK, **options)
        assert table.tokens[row].tolist() == expected.tokens
        assert table.parents[row].tolist() == expected.parents
        assert table.scores[row].tolist() == pytest.approx(expected.scores, rel=1e-5)
        self.compared += 1
        self.with_match += bool(path)


def shallow(original: Any, *args: Any, **kwargs: Any) -> None:
    original(*args, **kwargs)
    args[5].depths.clamp_(max=STEPS)


def test_same_tokens_and_more_of_them_per_step(
    pair: Pair,
    copies: list[Request],
    others: list[Request],
    right: Answers,
    tree_alone: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunked prompts, shared prefixes, async scheduling, steps without drafts."""
    watch = Watch(monkeypatch)
    with pair.engine(**TREE, tree={"ngram": NGRAM}, **CROWDED) as llm:
        assert not differing(answer_all(llm, copies), right[0])
        length = spec_metrics(llm).acceptance_length
        with scheduling(llm) as seen:
            assert not differing(answer_all(llm, others), right[1])
        (info,) = llm.collective_rpc("graft_info")
        assert seen.prompt_chunks > 0
        assert seen.chunks_beside_drafts > 0
        assert counter(llm, "vllm:prefix_cache_hits") > 0
        # What the host has is what the device has counted.
        numbers = {name: counter(llm, f"vllm:graft_tree_ngram_nodes_{name}") for name in COUNTED}
        assert watch.with_match > 10
        assert watch.compared > watch.with_match
        assert watch.deepest > STEPS + 4
        # Negative control: nodes below the draft's levels get the positions of its last level.
        wrap(monkeypatch, (tree_drafting, "finish_tree", shallow))
        assert llm.reset_prefix_cache()
        assert differing(answer_all(llm, copies), right[0])
    assert length > 1.4 * tree_alone, (length, tree_alone)
    found = info["counters"]["tree"]["ngrams"]
    assert found["nodes_verified"] > found["nodes_accepted"] > 15
    assert list(found["rates"]) == list(range(2, 9))
    assert found["rates"][8] > 0.89
    assert numbers == {name: found[f"nodes_{name}"] for name in COUNTED}
