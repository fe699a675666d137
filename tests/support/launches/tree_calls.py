"""Calls of the kernels that grow, verify and walk trees, and read texts."""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from vllm_graft.spec_decode.kernels.batch_slots import keep_slots
from vllm_graft.spec_decode.kernels.candidates import expand_frontier, finish_tree, seed_frontier
from vllm_graft.spec_decode.kernels.compact import KVCacheTable, TokenRows, compact_kv, follow_path
from vllm_graft.spec_decode.kernels.history import (
    BadWords,
    PathTokens,
    Penalties,
    ThinkingBudgets,
    end_reasoning,
    forbid_bad_words,
    path_tokens,
    penalize,
)
from vllm_graft.spec_decode.kernels.ngram_insert import (
    Learned,
    insert_ngrams,
    insert_paths,
    learn_rates,
)
from vllm_graft.spec_decode.kernels.ngram_match import match_ngrams
from vllm_graft.spec_decode.kernels.text_memory import search_memory, write_corpus, write_memory
from vllm_graft.spec_decode.kernels.topk import Noise, topk_logprobs
from vllm_graft.spec_decode.kernels.verify import TreeRows, prepare_rows, walk_tree
from vllm_graft.spec_decode.startup.stand_ins import META, empty
from vllm_graft.spec_decode.trees.text_state import BORDER, MemoryState, NgramState
from vllm_graft.spec_decode.trees.tree import CandidateTable, TreeState

i64 = partial(empty, dtype=torch.int64)
f32 = partial(empty, dtype=torch.float32)
VOCABULARY = 32_000


def grow(topk: int, steps: int) -> None:
    table = CandidateTable.allocate(2, topk, steps, META)
    seed_frontier(table, f32(2, topk), i64(2, topk), 2, empty(2 * topk))
    children = f32(2 * topk, topk), i64(2 * topk, topk)
    expand_frontier(table, 1, *children, 2, empty(2 * topk), i64(2 * topk))


def finish(topk: int, steps: int, nodes: int, extra: int = 0) -> None:
    table, tree = CandidateTable.allocate(2, topk, steps, META, extra), trees(nodes)
    marked = i64(4) if extra else None
    given = table, 2, steps, nodes, i64(2), tree, i64(2, nodes)
    finish_tree(*given, num_extra=extra, extra_nodes=marked)


def trees(nodes: int) -> TreeState:
    return TreeState.allocate(4, nodes, META)


def rows() -> None:
    batch: Any = SimpleNamespace(
        idx_mapping=i64(2), query_start_loc=empty(3), cu_num_logits=empty(3), positions=i64(64),
        num_reqs=2, num_reqs_after_padding=2,
    )  # fmt: skip
    prepare_rows(trees(63), batch, empty(4), TreeRows.allocate(4, 128, META), plain_rows=True)


def walk() -> None:
    """Two kinds of nodes are counted, and requests that teach nothing are told apart."""
    walk_tree(
        i64(64), i64(64), empty(3), i64(2), trees(63), i64(2, 64), empty(2, 64), empty(2), i64(64),
        empty(256), empty(VOCABULARY), i64(2, 256), i64(4), empty(256), empty(2), empty(2),
    )  # fmt: skip


def follow() -> None:
    before, after = (TokenRows(empty(64), i64(64), half(64, 4096)) for _ in range(2))
    sizes = {"num_reqs": 2, "num_tokens": 64, "max_reqs": 256}
    follow_path(empty(2, 64), empty(2), empty(3), empty(2), before, after, **sizes)


def half(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.bfloat16)


def compact(width: int) -> None:
    """Units are as wide as the size of a head's K and V in bfloat16 allows."""
    table = KVCacheTable.build([half(4, 1, 16, width)], [0])
    compact_kv(table, empty(2, 64), empty(2), empty(3), empty(2), i64(1, 64), 2)


def ranked(dtype: torch.dtype, topk: int, vocabulary: int, *, mapped: bool) -> None:
    """The best tokens of logits with noise, and of logits to which nodes' biases are added."""
    ids = i64(vocabulary) if mapped else None

    def noise(requests: int, offset: int) -> Noise:
        slots = f32(4), i64(4), empty(requests), i64(requests * topk)
        return Noise(*slots, rows=topk, offset=offset, fp64=mapped)

    logits = empty(2 * topk, vocabulary, dtype=dtype)
    topk_logprobs(logits, topk, ids, noise=noise(2, 1))
    requests = 8
    biases = empty(requests * topk, vocabulary, dtype=dtype)
    shared = empty(requests, vocabulary, dtype=dtype)
    topk_logprobs(shared, topk, ids, None, noise(requests, 0), biases=biases)


def texts(
    width: int, matches: int = 1, reference: int = 0, memory: int = 0, corpora: int = 0
) -> NgramState:
    kept = MemoryState.allocate(memory, 4, META, corpora) if memory else None
    return NgramState.allocate(3, 16, 4, width, META, matches, reference, kept)


def _matched(state: NgramState) -> None:
    match_ngrams(state, empty(4, state.width), empty(4), i64(2), 2)
    search_memory(state, empty(4), i64(2), 2)


def _learned(state: NgramState) -> Learned:
    kinds = 1 if state.memory is None else 2
    return Learned(state.pending, state.rates, i64(2 * kinds), i64(2 * kinds))


def ngrams(topk: int, levels: int, depth: int, state: NgramState) -> None:
    """One match beside a draft's levels."""
    table = CandidateTable.allocate(2, topk, levels, META, extra=depth)
    first = table.scores.shape[1] - depth
    places: dict[str, int] = {"levels": levels, "first": first, "depth": depth}
    _matched(state)
    insert_ngrams(table, state, empty(4), i64(2), 2, **places, vocab_size=VOCABULARY)
    learn_rates(_learned(state))


def paths(depth: int, nodes: int, state: NgramState) -> None:
    """Matches without a draft model."""
    table = CandidateTable.allocate(2, nodes, 1, META, extra=state.matches * depth)
    _matched(state)
    sizes: dict[str, int] = {"first": nodes, "depth": depth}
    insert_paths(table, state, empty(4), i64(2), 2, **sizes, vocab_size=VOCABULARY)
    keep_slots(empty(2), i64(4, 1), empty(4), i64(4), 2, _learned(state))


def remember() -> None:
    memory = MemoryState.allocate(1 << 24, 256, META, corpora=1 << 20)
    write_memory(memory, empty(256, 4096), empty(256), i64(2), 2)
    write_corpus(memory, 1, range(2), [3, BORDER], memory.corpora)


def histories() -> None:
    """Penalties, bad words and thinking budgets of rows of trees."""
    logits, slots = f32(8, VOCABULARY), i64(8)
    path_tokens(empty(8), empty(8), slots, trees(63))
    given = PathTokens(empty(8, 64), empty(8))
    numbers = f32(4), f32(4), f32(4), empty(4, 1000), empty(4, VOCABULARY)
    penalize(logits, slots, given, Penalties(*numbers))
    given = PathTokens(empty(8, 32), empty(8))
    words = empty(4), empty(4, 9), empty(4, 100), empty(4, 4096), empty(4), empty(4)
    forbid_bad_words(logits, slots, given, BadWords(*words), 8)
    markers = empty(4, 4096), empty(4), empty(2), empty(3), empty(3)
    end_reasoning(logits, slots, given, ThinkingBudgets(empty(4), empty(4), empty(4), *markers))


def calls() -> Iterator[Callable[[], object]]:
    for topk, steps in ((8, 6), (10, 2)):
        yield partial(grow, topk, steps)
    for sizes in ((8, 6, 31), (10, 7, 63), (1, 1, 1), (32, 12, 63), (8, 6, 63, 63)):
        yield partial(finish, *sizes)
    yield from (rows, walk, follow, remember, histories)
    yield from (partial(compact, width) for width in (256, 63))
    yield partial(ranked, torch.bfloat16, 8, 32_000, mapped=True)
    yield partial(ranked, torch.float32, 32, 128_256, mapped=False)
    yield partial(ngrams, 8, 6, 63, texts(131_072, reference=4096))
    yield partial(ngrams, 2, 1, 2, texts(256))
    yield partial(ngrams, 32, 12, 63, texts(1_048_576))
    yield partial(ngrams, 8, 6, 63, texts(32_768, memory=1 << 20))
    yield partial(paths, 6, 31, texts(131_072, 8, reference=4096))
    yield partial(paths, 5, 5, texts(256))
    yield partial(paths, 31, 63, texts(32_768, 4, 2048, memory=1 << 24, corpora=1 << 20))
    yield partial(paths, 32, 63, texts(1_048_576, 32))
