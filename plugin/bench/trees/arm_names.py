"""Arms of ``vllm-graft bench trees``: their names, and the engines that they stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_graft.base.errors import ConfigError
from vllm_graft.bench.common.arm import Arm
from vllm_graft.bench.common.report import BenchmarkError
from vllm_graft.config import GraftConfig
from vllm_graft.spec_decode.config.ngram_config import NgramConfig
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.presets.ngram_preset import ALONE_MIN, DEPTH, MATCHES

NAMES = (
    "none, graft (the preset auto, without a draft), graft+memory, chain:K[,K...], "
    "sampled:K[,K...], block:K[,K...], adaptive:K[,K...], ngram:K, tree:N, tree:N@RANGES or "
    "auto:N; +fp8 or +pdl behind a name, +ngram, +memory, +fp8head, +whole, +states, +hotN or "
    "+windowW behind tree:N or auto:N"
)
_WITHOUT_DRAFT: dict[str, dict[str, Any]] = {
    "none": {},
    "graft": {"additional_config": {"graft": "auto"}},
    "graft+memory": {
        "speculative_config": {
            "method": "ngram_gpu",
            "num_speculative_tokens": DEPTH,
            "prompt_lookup_min": ALONE_MIN,
            "prompt_lookup_max": NgramConfig().max,
        },
        "additional_config": {
            "graft": {"tree": {"topk": MATCHES, "nodes": 63, "shape": "auto", "memory": True}}
        },
    },
}
_CHAINS: dict[str, dict[str, Any]] = {
    "chain": {},
    "sampled": {"draft_sample_method": "probabilistic"},
    "block": {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"},
    "adaptive": {
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "block",
        "enable_adaptive_verification": True,
    },
}
"""Chains of stock vLLM, and the keys that they add to the speculative configuration."""

_NGRAM = {"method": "ngram_gpu", "prompt_lookup_min": 1, "prompt_lookup_max": 8}
"""Stock vLLM's n-grams, which need no draft model and let it schedule asynchronously. Matches of
one token on give it the most tokens per step on prose."""

FP8 = "+fp8"
"""Suffix of a name: the draft is in FP8, and its output head too in our arms (vLLM keeps that)."""

PDL = "+pdl"
"""Suffix of a name: kernels that the compiler writes begin before the ones before them have ended
(programmatic dependent launch, on Hopper or later)."""

_TREES: dict[str, dict[str, Any]] = {
    "+fp8head": {"head_dtype": "fp8"},
    "+ngram": {"ngram": True},
    "+memory": {"ngram": True, "memory": True},
    "+whole": {"policy": "whole"},
    "+states": {"recurrent_form": "states"},
}
"""Suffixes of a tree's name, and the keys of ``graft.tree`` that they add."""

_NUMBERED = re.compile(r"\+(hot|window)([1-9][0-9]{0,9})$")
"""Suffix of a tree's name, with the number that its key of ``graft.tree`` gets."""

_NUMBERED_KEYS = {"hot": "hot_tokens", "window": "draft_window"}
"""So many tokens are learned that drafts are chosen from, or the draft sees so many tokens."""


def is_chain(column: str) -> bool:
    """Whether a column is a chain of stock vLLM, which is told its length."""
    return column.partition(":")[0] in _CHAINS


METHODS = ("eagle3", "eagle", "mtp", "dflash", "dspark")
"""vLLM's methods whose drafts a pair may hold, each in a folder of this name."""

_BLOCKS = ("dflash", "dspark")
"""Methods whose checkpoint says how deep a tree is."""


def draft_folder(pair: Path, method: str) -> Path:
    """Where a pair has its draft; an MTP module is part of the target's checkpoint."""
    return pair / ("target" if method == "mtp" else method)


def read_arm(
    name: str, draft: Path, topk: int, steps: int, max_num_seqs: int, method: str = "eagle3"
) -> Arm:
    """Make the arm of a name, one of `NAMES`.

    Args:
        name: the name.
        draft: folder of the draft; of the target itself with ``method`` mtp.
        topk: topk of trees.
        steps: steps of trees; with ``auto`` the most steps.
        max_num_seqs: the engine's limit; a batch size stands for each of several lengths of chains.
        method: vLLM's method of the draft.

    Raises:
        BenchmarkError: the name can't be read, or the tree can't hold so many nodes.
    """
    base, suffixes, keys = _suffixes(name)
    kind, _, rest = base.partition(":")
    counts, _, ranges = rest.partition("@")
    options: dict[str, Any] = {}
    if PDL in suffixes:
        inductor = {"triton.enable_pdl": True}
        options["compilation_config"] = {"inductor_compile_config": inductor}
    if (plain := name.removesuffix(PDL)) in _WITHOUT_DRAFT:
        return Arm(name, options | _WITHOUT_DRAFT[plain])
    numbers = [int(count) for count in counts.split(",") if count.isdigit()]
    several = kind in _CHAINS
    known = (several and not keys) or kind in ("tree", "auto")
    known |= kind == "ngram" and not keys and FP8 not in suffixes
    if not known or not numbers or ",".join(map(str, numbers)) != counts:
        raise BenchmarkError(f"--arms {name!r}: say {NAMES}")
    if len(numbers) > 1 and not (several and len(set(numbers)) == len(numbers) <= max_num_seqs):
        raise BenchmarkError(
            f"--arms {name!r}: several numbers are for chains, each once, and for no fewer "
            f"requests than numbers ({max_num_seqs} here)"
        )
    if kind == "ngram":
        options["speculative_config"] = {**_NGRAM, "num_speculative_tokens": numbers[0]}
        return Arm(name, options)
    speculative: dict[str, Any] = {
        "method": method,
        "model": str(draft),
        "num_speculative_tokens": max(numbers),
    }
    if FP8 in suffixes:
        speculative["quantization"] = "fp8_per_channel"
    options["speculative_config"] = speculative
    if ranges:
        speculative["num_speculative_tokens_per_batch_size"] = _given(name, ranges)
    speculative |= _CHAINS.get(kind, {})
    if several and len(numbers) > 1:
        speculative["num_speculative_tokens_per_batch_size"] = _ranges(numbers, max_num_seqs)
        return Arm(name, options, tuple(numbers))
    if not several:
        if kind == "auto":
            keys["shape"] = "auto"
        if FP8 in suffixes:
            keys["head_dtype"] = "fp8"
        # On targets with recurrent layers, too, where trees need asking.
        tree = {"topk": topk, "steps": steps, "recurrent": True, **keys}
        _check_tree(name, tree, 0 if method.startswith(_BLOCKS) else max(numbers))
        options["additional_config"] = {"graft": {"tree": tree}}
    return Arm(name, options)


def _check_tree(name: str, tree: dict[str, Any], nodes: int) -> None:
    """Check the keys of an arm's trees, and that these can hold so many nodes."""
    holds = TreeConfig(topk=tree["topk"], steps=tree["steps"]).num_candidates
    if nodes > holds:
        raise BenchmarkError(
            f"--arms {name!r}: a tree of topk {tree['topk']} and {tree['steps']} steps holds "
            f"{holds} nodes: lower the number, or raise --topk or the steps"
        )
    try:
        GraftConfig.parse({"tree": tree})
    except ConfigError as wrong:
        raise BenchmarkError(f"--arms {name!r}: {wrong}") from None


def _suffixes(name: str) -> tuple[str, set[str], dict[str, Any]]:
    """A name without its suffixes, those that any arm may have, and the keys of the others."""
    found, keys = set[str](), dict[str, Any]()
    while True:
        if says := _NUMBERED.search(name):
            key = _NUMBERED_KEYS[says[1]]
            if key in keys:
                raise BenchmarkError(f"--arms {name!r}: a draft has one +{says[1]}, say one")
            keys[key], name = int(says[2]), name[: says.start()]
        elif suffix := next((each for each in (*_TREES, FP8, PDL) if name.endswith(each)), ""):
            name = name.removesuffix(suffix)
            keys |= _TREES.get(suffix, {})
            found |= {suffix} - _TREES.keys()
        else:
            return name, found, keys


def _given(name: str, ranges: str) -> Any:
    try:
        return json.loads(ranges)
    except ValueError as wrong:
        raise BenchmarkError(
            f"--arms {name!r}: what stands behind @ is no JSON ({wrong}): say it like "
            "[[1,4,15],[5,8,3]]"
        ) from None


def _ranges(numbers: Sequence[int], max_num_seqs: int) -> list[list[int]]:
    """Give each number a batch size, longest chains first, so that vLLM captures them all."""
    found = [[place, place, count] for place, count in enumerate(sorted(numbers, reverse=True), 1)]
    found[-1][1] = max_num_seqs
    return found
