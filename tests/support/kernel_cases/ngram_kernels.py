"""Specialisations of the kernels of n-grams that must compile."""

from vllm_graft.spec_decode.kernels.history import BLOCK
from vllm_graft.spec_decode.kernels.ngram_paths import warps
from vllm_graft.spec_decode.kernels.sizes import next_power_of_2
from vllm_graft.spec_decode.trees.memory_state import MemoryState
from vllm_graft.spec_decode.trees.ngram_state import NgramState, scan_block
from vllm_graft.testing.compiling import KernelCase, argument_types

_KERNELS = "vllm_graft.spec_decode.kernels"

_TEXTS = dict.fromkeys(("total_len", "history", "notes", "pending", "keys"), "*i32") | {
    "idx_mapping": "*i64",
    "rates": "*fp32",
    "history_stride": "i32",
}
_MATCH = {
    **{name: kind for name, kind in _TEXTS.items() if name not in ("pending", "rates")},
    "source": "*i32",
    "source_stride": "i32",
    "keys_stride": "i32",
}
_MEMORY = {"memory": "*i32", "segments": "*i64"}
_INDEX = {"cells": "*i64", "owners": "*i64", "head": "*i64"}
_TABLE = {"scores": "*fp32", "tokens": "*i64", "parents": "*i32", "vocab_size": "i32"}


def _match_cases(state: NgramState, name: str) -> list[KernelCase]:
    block, memory = scan_block(state.history.shape[1]), state.memory
    sizes = {
        "MIN_N": state.min_n,
        "MAX_N": state.max_n,
        "MATCHES": state.matches,
        "REFERENCE": state.reference,
    }
    match = KernelCase(
        name=f"match {name}",
        function=f"{_KERNELS}.ngram_match:_match_kernel",
        signature={**_MATCH},
        constexprs={**sizes, "BLOCK": block},
        options={"num_warps": 4 if block > 512 else 1},
    )
    if memory is None:
        return [match]
    left_out = ("notes", "pending")
    search = KernelCase(
        name=f"search {name}",
        function=f"{_KERNELS}.text_memory:_search_kernel",
        signature={
            **{name: kind for name, kind in _TEXTS.items() if name not in left_out},
            **_MEMORY,
            **_INDEX,
            "keys_stride": "i32",
        },
        constexprs={
            **sizes,
            "MAX_N_PAD": next_power_of_2(state.max_n),
            "LENGTHS": state.lengths,
            "SEGMENTS": memory.corpora or memory.size,
            "BEFORE_IT": memory.size if memory.corpora else 0,
            "COLUMN": state.keys.shape[1] - state.matches,
        },
        options={"num_warps": 1},
    )
    return [match, search]


def _sources(state: NgramState) -> tuple[dict[str, str], dict[str, None]]:
    """Arguments of a memory: those that are there, and those that are None."""
    names = {**_MEMORY, "sources": "*i32"}
    return (names, {}) if state.memory else ({}, dict.fromkeys(names))


def _path_cases(
    paths: int, depth: int, nodes: int, width: int, reference: int = 0, memory: int = 0
) -> list[KernelCase]:
    """Trees of n-grams alone: several matches, and their paths."""
    kept = MemoryState.allocate(memory, 1, "cpu", corpora=memory) if memory else None
    state = NgramState.allocate(3, 16, 1, width, "cpu", paths, reference, kept)
    count, name = state.keys.shape[1], f"{paths} n-grams width={width}+{reference}+{memory}"
    signature, absent = _sources(state)
    insert = KernelCase(
        name=f"insert {name}",
        function=f"{_KERNELS}.ngram_paths:_paths_kernel",
        signature={**_TEXTS, **_TABLE, **signature},
        constexprs={
            **absent,
            "WIDTH": nodes + paths * depth,
            "FIRST": nodes,
            "PATHS": paths,
            "PATHS_PAD": next_power_of_2(paths),
            "DEPTH": depth,
            "DEPTH_PAD": next_power_of_2(depth),
            "KEYS": count,
            "KEYS_PAD": next_power_of_2(count),
            "REFERENCE": reference,
            "LENGTHS": state.lengths,
        },
        options={"num_warps": warps(count)},
    )
    return [*_match_cases(state, name), insert]


def _ngram_cases(
    topk: int, levels: int, depth: int, width: int, reference: int = 0, memory: int = 0
) -> list[KernelCase]:
    kept = MemoryState.allocate(memory, 1, "cpu") if memory else None
    state = NgramState.allocate(3, 16, 1, width, "cpu", 1, reference, kept)
    blocks, name = state.keys.shape[1], f"n-grams width={width}+{reference}+{memory}"
    signature, absent = _sources(state)
    first = topk + (levels - 1) * topk * topk
    insert = KernelCase(
        name=f"insert topk={topk} {name}",
        function=f"{_KERNELS}.ngram_insert:_insert_kernel",
        signature={**_TEXTS, **_TABLE, **signature},
        constexprs={
            **absent,
            "WIDTH": first + depth,
            "TOPK": topk,
            "LEVELS": levels,
            "FIRST": first,
            "DEPTH": depth,
            "DEPTH_PAD": next_power_of_2(depth),
            "CHILDREN_PAD": next_power_of_2(topk if levels == 1 else topk**2),
            "BLOCKS": blocks,
            "BLOCKS_PAD": next_power_of_2(blocks),
            "REFERENCE": reference,
            "LENGTHS": state.lengths,
        },
        options={"num_warps": 1 if topk <= 8 else 4},
    )
    learn = KernelCase(
        name=f"learn {len(state.rates)} rates of n-grams",
        function=f"{_KERNELS}.ngram_insert:_learn_kernel",
        signature={"pending": "*i32", "rates": "*fp32"},
        constexprs={"PAD": len(state.rates), "MEMORY": 256.0, "LOW": 0.01, "HIGH": 0.99},
        options={"num_warps": 1},
    )
    return [*_match_cases(state, name), insert, learn]


def _memory_cases(size: int, max_reqs: int) -> list[KernelCase]:
    """What is added to a memory, and to its corpora."""
    memory = MemoryState.allocate(size, max_reqs, "cpu", size)
    segments = {"segments": "*i64", "cells": "*i64"}
    write = KernelCase(
        name=f"write to {memory.size} segments",
        function=f"{_KERNELS}.text_memory:_write_kernel",
        signature={
            **dict.fromkeys(("idx_mapping", "owners", "writers", "head"), "*i64"),
            **dict.fromkeys(("source", "total_len", "tokens"), "*i32"),
            **segments,
            "source_stride": "i32",
        },
        constexprs={
            "REQUESTS": max_reqs,
            "PAD": next_power_of_2(max_reqs),
            "SEGMENTS": memory.size,
        },
        options={"num_warps": 4},
    )
    corpus = KernelCase(
        name=f"write to {memory.corpora} segments of corpora",
        function=f"{_KERNELS}.text_memory:_corpus_kernel",
        signature={**segments, "text": "*i32", "places": "*i64", "serial": "i64"},
        constexprs={"BEFORE_IT": memory.size, "CORPORA": memory.corpora},
        options={},
    )
    return [write, corpus]


NGRAM_CASES: list[KernelCase] = [
    *_ngram_cases(topk=8, levels=6, depth=63, width=131_072, reference=4096),
    *_ngram_cases(topk=2, levels=1, depth=2, width=256),
    *_ngram_cases(topk=32, levels=12, depth=63, width=1_048_576),
    *_path_cases(paths=8, depth=6, nodes=31, width=131_072, reference=4096),
    *_path_cases(paths=1, depth=5, nodes=5, width=256),
    *_path_cases(paths=4, depth=31, nodes=63, width=32_768, reference=2048, memory=1 << 24),
    *_ngram_cases(topk=8, levels=6, depth=63, width=32_768, memory=1 << 20),
    *_memory_cases(1 << 24, 256),
    *_path_cases(paths=32, depth=32, nodes=63, width=1_048_576),
]


_HISTORY = "vllm_graft.spec_decode.kernels.history"


HISTORY_CASES: list[KernelCase] = [
    KernelCase(
        name="path tokens",
        function=f"{_HISTORY}:_path_kernel",
        signature=argument_types(
            {"*i32": "ids nodes parents depths path_tokens path_lengths", "*i64": "slots"}
        ),
        constexprs={"WIDTH": 64},
        options={"num_warps": 1},
    ),
    KernelCase(
        name="penalties",
        function=f"{_HISTORY}:_penalties_kernel",
        signature=argument_types(
            {
                "*fp32": "logits repetitions frequencies presences",
                "*i64": "slots",
                "*i32": "path_tokens path_lengths prompt_bits counts",
                "i32": "logits_stride bits_stride counts_stride vocab",
            }
        ),
        constexprs={"WIDTH": 64, "BLOCK": BLOCK},
        options={"num_warps": 4},
    ),
    KernelCase(
        name="bad words",
        function=f"{_HISTORY}:_bad_words_kernel",
        signature=argument_types(
            {
                "*fp32": "logits",
                "*i64": "slots",
                "*i32": "path_tokens path_lengths numbers offsets word_tokens all_tokens "
                "prompt_lens total_lens",
                "i32": "logits_stride offsets_stride words_stride tokens_stride",
            }
        ),
        constexprs={"WIDTH": 32},
        options={"num_warps": 1},
    ),
    KernelCase(
        name="thinking budgets",
        function=f"{_HISTORY}:_thinking_kernel",
        signature=argument_types(
            {
                "*fp32": "logits",
                "*i64": "slots",
                "*i32": "path_tokens path_lengths budgets starts ends all_tokens total_lens "
                "start_marker end_marker forced",
                "i32": "logits_stride tokens_stride start_len end_len forced_len",
            }
        ),
        constexprs={"WIDTH": 32, "FORCED": 1.0e9},
        options={"num_warps": 1},
    ),
]
