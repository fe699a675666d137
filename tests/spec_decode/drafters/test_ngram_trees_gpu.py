"""Trees of n-grams alone on a device: the kernels in a CUDA graph, and an engine in FULL graphs."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.answers.text_requests import in_pairs
from tests.support.engines.pairs import Pair, answer_all, differing
from tests.support.engines.shipped_pair import SHIPPED
from tests.support.references.ngram_reference import (
    check_nodes,
    continuation,
    last_match,
    nodes_in,
    several_matches,
    trie_of,
)
from tests.support.samples.attention_spaces import captured
from vllm_graft.spec_decode.kernels.ngram_insert import insert_ngrams, insert_paths
from vllm_graft.spec_decode.kernels.ngram_match import match_ngrams
from vllm_graft.spec_decode.trees.text_state import MAX_PLACE, NgramState
from vllm_graft.spec_decode.trees.tree import CandidateTable, num_candidates

pytestmark = pytest.mark.gpu

REQS, FIRST = 4, 31


class Followed:
    """A CUDA graph that follows texts as they grow, change hands and become padding."""

    def __init__(self, width: int, texts: list[list[int]]) -> None:
        self.texts = texts
        self.source = torch.zeros(REQS, width, dtype=torch.int32, device="cuda")
        self.lengths = torch.zeros(REQS, dtype=torch.int32, device="cuda")
        self.slots = torch.full((REQS,), -1, device="cuda")

    def steps(
        self,
        launch: Callable[[], None],
        state: NgramState,
        count: int,
        other: list[int],
        start: Callable[[list[int]], int],
    ) -> Iterator[list[int]]:
        """Replay a graph of `launch` for each step; yields the slots of its rows.

        Texts go on as from `start`, and after three steps one is another request's.
        """
        graph = captured(launch)
        for step in range(count):
            for slot, text in enumerate(self.texts):
                self.source[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
                self.lengths[slot] = len(text)
            self.slots.copy_(torch.tensor([2, 0, -1 if step == 3 else 1, 3]))
            graph.replay()
            yield self.slots.tolist()
            for text in self.texts:
                text += continuation(text, start(text), 5)
            if step == 2:
                self.texts[2] = other
                state.notes[2].zero_()


@pytest.mark.parametrize(
    ("matches", "depth", "width", "vocab"),
    [(8, 6, 131_072, 40), (1, 5, 256, 3), (32, 32, 20_000, 12)],
)
def test_kernels_in_a_cuda_graph(matches: int, depth: int, width: int, vocab: int) -> None:
    rng = random.Random(matches)
    state = NgramState.allocate(2, 8, REQS, width, "cuda", matches=matches)
    table = CandidateTable.allocate(REQS, 1, FIRST, "cuda", extra=matches * depth)
    sizes = (min(width - 99, 9000), width // 3 if width < 30_000 else 5000, 9, 60)
    given = Followed(width, [[rng.randrange(vocab) for _ in range(size)] for size in sizes])

    def launch() -> None:
        of = state, given.lengths, given.slots, REQS
        match_ngrams(state, given.source, *of[1:])
        insert_paths(table, *of, first=FIRST, depth=depth, vocab_size=vocab)

    def start(text: list[int]) -> int:
        best = several_matches(text, 2, 8, 1)
        return best[0].start if best else 0

    branching = 0
    for slots in given.steps(launch, state, 4, [1, 0, 2] * 10, start):
        for row, slot in enumerate(slots):
            found = nodes_in(table, row, FIRST, matches, depth)
            if slot < 0:
                assert not found
                continue
            trie = trie_of(given.texts[slot], state, state.rates.tolist(), depth, vocab)
            check_nodes(found, trie)
            branching += len(set(trie.owners.values())) > 1
    assert branching > (4 if matches > 1 else -1)


WIDTH, DEPTH = 131_072, 31


def test_a_long_text_in_a_cuda_graph() -> None:
    """Texts have 128k tokens."""
    rng = random.Random(1)
    state = NgramState.allocate(3, 16, REQS, WIDTH, "cuda")
    table = CandidateTable.allocate(REQS, 4, 3, "cuda", extra=DEPTH)
    texts = [[rng.randrange(1000) for _ in range(size)] for size in (130_900, 70_000, 9, 2100)]
    # Of two equally long matches the later one counts, 100k tokens before the end.
    texts[0][10:26] = texts[0][30_000:30_016] = texts[0][-16:]
    given, first = Followed(WIDTH, texts), num_candidates(4, 2)

    def launch() -> None:
        table.tokens.fill_(-5)
        of = state, given.lengths, given.slots, REQS
        match_ngrams(state, given.source, *of[1:])
        insert_ngrams(table, *of, levels=2, first=first, depth=DEPTH, vocab_size=1000)

    def start(text: list[int]) -> int:
        found = last_match(text, 3, 16)
        return found.start if found else 0

    matches = 0
    for slots in given.steps(launch, state, 5, [7, 8, 9] * 40, start):
        keys = state.keys.max(1).values.tolist()
        for row, slot in enumerate(slots):
            found = last_match(texts[slot], 3, 16) if slot >= 0 else None
            assert keys[row] // MAX_PLACE == (found.length if found else 0)
            if found:
                matches += 1
                assert keys[row] % MAX_PLACE + 1 == found.start
                path = continuation(texts[slot], found.start, DEPTH)
                assert table.tokens[row, first : first + DEPTH].tolist() == path
    assert matches > 10


@pytest.mark.engine
@pytest.mark.parametrize("head", [False, True])
def test_an_engine_in_full_graphs(head: bool) -> None:
    """Tokens are those of the target alone; the negative control is in the CPU's tests."""
    lines = ("pass\n", "# ---------------------------------\n", "import os, sys\nimport os\n")
    requests = in_pairs(48, [line * 6 for line in lines], temperature=0.3)
    options: dict[str, Any] = {"tree": {"ngram": {"min": 2, "max": 8}}}
    if not head:
        lengths = {"prompt_lookup_min": 2, "prompt_lookup_max": 8}
        options = {"method": "ngram_gpu", "speculative": lengths, "steps": 6}
    pair = Pair.load(SHIPPED).on("cuda")
    with pair.engine() as llm:
        expected = answer_all(llm, requests)
    with pair.engine(nodes=15, **options) as llm:
        assert differing(answer_all(llm, requests), expected) == []
        (info,) = llm.collective_rpc("graft_info")
        if head:
            # A request that predicts its answer gets the same one, in no more steps.
            steps = info["counters"]["tree"]["verify_steps"]
            predicted = [
                replace(each, params={**each.params, "extra_args": {"graft_prediction": tokens}})
                for each, tokens in zip(requests, [answer.tokens[0] for answer in expected])
            ]
            assert differing(answer_all(llm, predicted), expected) == []
            (after,) = llm.collective_rpc("graft_info")
            assert after["counters"]["tree"]["verify_steps"] - steps <= steps
    found = info["counters"]["tree"]
    assert found["draft_replays"] > 0
    assert found["tree_replays"] > 0
    assert found["ngrams"]["nodes_verified"] > found["ngrams"]["nodes_accepted"] > 20
