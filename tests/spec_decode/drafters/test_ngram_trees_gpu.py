"""Trees of n-grams alone on a device: the kernels in a CUDA graph, and an engine in FULL graphs."""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.engines.gpu_engines import exact_engine
from tests.support.engines.pairs import Request, answer_all, differing
from tests.support.engines.shipped_pair import SHIPPED
from tests.support.references.ngram_reference import continuation, several_matches
from tests.support.references.ngram_tries import check_nodes, nodes_in, trie_of
from vllm_graft.spec_decode.kernels.ngram_match import match_ngrams
from vllm_graft.spec_decode.kernels.ngram_paths import insert_paths
from vllm_graft.spec_decode.trees.candidates import CandidateTable
from vllm_graft.spec_decode.trees.ngram_state import NgramState

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

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
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
        target,
        method="ngram_gpu",
        nodes=15,
        tree={"topk": 4, "steps": 6},
        speculative=speculative,
    ) as llm:
        assert differing(answer_all(llm, requests), expected) == []
        (info,) = llm.collective_rpc("graft_info")
    found = info["counters"]["tree"]
    assert found["draft_replays"] > 0
    assert found["tree_replays"] > 0
    assert found["ngrams"]["nodes_verified"] > found["ngrams"]["nodes_accepted"] > 20
