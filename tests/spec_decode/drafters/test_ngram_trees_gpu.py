"""Trees of n-grams alone on a device: the kernels in a CUDA graph, and an engine in FULL graphs."""

import random

import pytest
import torch

from tests.support.engines.gpu_engines import exact_engine
from tests.support.engines.pairs import Request, answer_all, differing
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
from vllm_graft.spec_decode.kernels.ngram_insert import insert_ngrams
from vllm_graft.spec_decode.kernels.ngram_match import match_ngrams
from vllm_graft.spec_decode.kernels.ngram_paths import insert_paths
from vllm_graft.spec_decode.trees.candidates import CandidateTable
from vllm_graft.spec_decode.trees.ngram_state import MAX_PLACE, NgramState
from vllm_graft.spec_decode.trees.shape import num_candidates

pytestmark = pytest.mark.gpu

REQS, FIRST = 4, 31


@pytest.mark.parametrize(
    ("matches", "depth", "width", "vocab"),
    [(8, 6, 131_072, 40), (1, 5, 256, 3), (32, 32, 20_000, 12)],
)
def test_kernels_in_a_cuda_graph(matches: int, depth: int, width: int, vocab: int) -> None:
    """One graph follows texts as they grow, change hands and become padding."""
    rng = random.Random(matches)
    state = NgramState.allocate(2, 8, REQS, width, "cuda", matches=matches)
    table = CandidateTable.allocate(REQS, 1, FIRST, "cuda", extra=matches * depth)
    sizes = (min(width - 99, 9000), width // 3 if width < 30_000 else 5000, 9, 60)
    texts = [[rng.randrange(vocab) for _ in range(size)] for size in sizes]
    source = torch.zeros(REQS, width, dtype=torch.int32, device="cuda")
    lengths = torch.zeros(REQS, dtype=torch.int32, device="cuda")
    slots = torch.full((REQS,), -1, device="cuda")

    def launch() -> None:
        match_ngrams(state, source, lengths, slots, REQS)
        insert_paths(table, state, lengths, slots, REQS, first=FIRST, depth=depth, vocab_size=vocab)

    graph = captured(launch)
    branching = 0
    for step in range(4):
        for slot, text in enumerate(texts):
            source[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
            lengths[slot] = len(text)
        slots.copy_(torch.tensor([2, 0, -1 if step == 3 else 1, 3]))
        graph.replay()
        for row, slot in enumerate(slots.tolist()):
            found = nodes_in(table, row, FIRST, matches, depth)
            if slot < 0:
                assert not found
                continue
            trie = trie_of(texts[slot], state, state.rates.tolist(), depth, vocab)
            check_nodes(found, trie)
            branching += len(set(trie.owners.values())) > 1
        for text in texts:
            best = several_matches(text, 2, 8, 1)
            text += continuation(text, best[0].start if best else 0, 5)
        if step == 2:
            texts[2] = [1, 0, 2] * 10
            state.notes[2].zero_()
    assert branching > (4 if matches > 1 else -1)


@pytest.mark.engine
def test_an_engine_in_full_graphs() -> None:
    """Tokens are those of the target alone; the negative control is in the CPU's tests."""
    lines = ("pass\n", "# ---------------------------------\n", "import os, sys\nimport os\n")
    requests = [
        Request(line * 6, {"max_tokens": 48, **kind})
        for line in lines
        for kind in ({"temperature": 0}, {"seed": 7, "temperature": 0.3})
    ]
    target = SHIPPED / "target"
    with exact_engine(target) as llm:
        expected = answer_all(llm, requests)
    # There is no checkpoint of a draft.
    speculative = {"model": None, "prompt_lookup_min": 2, "prompt_lookup_max": 8}
    with exact_engine(
        target, method="ngram_gpu", nodes=15, tree={"topk": 4, "steps": 6}, speculative=speculative
    ) as llm:
        assert differing(answer_all(llm, requests), expected) == []
        (info,) = llm.collective_rpc("graft_info")
    found = info["counters"]["tree"]
    assert found["draft_replays"] > 0
    assert found["tree_replays"] > 0
    assert found["ngrams"]["nodes_verified"] > found["ngrams"]["nodes_accepted"] > 20


WIDTH, LONG_REQS, DEPTH = 131_072, 4, 31


def test_a_long_text_in_a_cuda_graph() -> None:
    """One graph follows texts of 128k tokens as they grow, change hands and become padding."""
    rng = random.Random(1)
    state = NgramState.allocate(3, 16, LONG_REQS, WIDTH, "cuda")
    table = CandidateTable.allocate(LONG_REQS, 4, 3, "cuda", extra=DEPTH)
    texts = [[rng.randrange(1000) for _ in range(size)] for size in (130_900, 70_000, 9, 2100)]
    # Of two equally long matches the later one counts, 100k tokens before the end.
    texts[0][10:26] = texts[0][30_000:30_016] = texts[0][-16:]
    source = torch.zeros(LONG_REQS, WIDTH, dtype=torch.int32, device="cuda")
    lengths = torch.zeros(LONG_REQS, dtype=torch.int32, device="cuda")
    slots = torch.full((LONG_REQS,), -1, device="cuda")
    first = num_candidates(4, 2)

    def launch() -> None:
        match_ngrams(state, source, lengths, slots, LONG_REQS)
        insert_ngrams(
            table, state, lengths, slots, LONG_REQS,
            levels=2, first=first, depth=DEPTH, vocab_size=1000,
        )  # fmt: skip

    graph = captured(launch)
    matches = 0
    for step in range(5):
        for slot, text in enumerate(texts):
            source[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
            lengths[slot] = len(text)
        slots.copy_(torch.tensor([2, 0, -1 if step == 3 else 1, 3]))
        table.tokens.fill_(-5)
        graph.replay()
        keys = state.keys.max(1).values.tolist()
        for row, slot in enumerate(slots.tolist()):
            found = last_match(texts[slot], 3, 16) if slot >= 0 else None
            assert keys[row] // MAX_PLACE == (found.length if found else 0)
            if found:
                matches += 1
                assert keys[row] % MAX_PLACE + 1 == found.start
                path = continuation(texts[slot], found.start, DEPTH)
                assert table.tokens[row, first : first + DEPTH].tolist() == path
        for text in texts:
            found = last_match(text, 3, 16)
            start = found.start if found else 0
            text += continuation(text, start, 5)
        if step == 2:
            texts[2] = [7, 8, 9] * 40
            state.notes[2].zero_()
    assert matches > 10


@pytest.mark.engine
def test_an_engine_with_an_eagle_head_in_full_graphs() -> None:
    """Tokens are those of the target alone; the negative control is in the CPU's tests."""
    lines = ("pass\n", "# ---------------------------------\n", "import os, sys\n")
    requests = [
        Request(line * 6, {"max_tokens": 48, **kind})
        for line in lines
        for kind in ({"temperature": 0}, {"seed": 7, "temperature": 0.3})
    ]
    target, draft = SHIPPED / "target", str(SHIPPED / "eagle3")
    with exact_engine(target) as llm:
        expected = answer_all(llm, requests)
    tree = {"topk": 4, "steps": 4, "ngram": {"min": 2, "max": 8}}
    with exact_engine(target, draft=draft, nodes=15, tree=tree) as llm:
        assert differing(answer_all(llm, requests), expected) == []
        (info,) = llm.collective_rpc("graft_info")
        # A request that predicts its answer gets the same one, in no more steps.
        steps = info["counters"]["tree"]["verify_steps"]
        predicted = [
            Request(
                request.prompt,
                {**request.params, "extra_args": {"graft_prediction": answer.tokens[0]}},
            )
            for request, answer in zip(requests, expected, strict=True)
        ]
        assert differing(answer_all(llm, predicted), expected) == []
        (after,) = llm.collective_rpc("graft_info")
        assert after["counters"]["tree"]["verify_steps"] - steps <= steps
    found = info["counters"]["tree"]
    assert found["draft_replays"] > 0
    assert found["tree_replays"] > 0
    assert found["ngrams"]["nodes_verified"] > found["ngrams"]["nodes_accepted"] > 20
