"""Arms of a pair, a folder with `target/`, `eagle3/` and `prompts.json`, as `tests/pair` is.

Besides stock's arms of `vllm-graft bench trees` there are trees in one word, `tree:N` and `auto:N`
(`shape: auto`), with suffixes for their keys. With another method the draft's folder has its name;
an MTP module is in `target/`.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.replay import replay
from benchmarks.watched_loop import Call, WatchedLoop
from benchmarks.workloads.load import Load
from benchmarks.workloads.sources import Choice
from vllm_graft.base.errors import ConfigError
from vllm_graft.bench.common import arm_processes
from vllm_graft.bench.common.arm import Arm
from vllm_graft.bench.common.report import BenchmarkError
from vllm_graft.bench.common.told_lengths import SCHEDULER
from vllm_graft.bench.trees.arm_flags import CHAINS, NGRAM, ranges
from vllm_graft.config import GraftConfig
from vllm_graft.spec_decode.config.tree_config import TreeConfig

NAMES = (
    "none, graft (the preset auto, without a draft), graft+memory, chain:K[,K...], "
    "sampled:K[,K...], block:K[,K...], adaptive:K[,K...], ngram:K, graft-chain:K (a chain in "
    "graft.draft's graphs), tree:N, tree:N@RANGES or auto:N; +fp8 or +pdl behind a name, +ngram, "
    "+memory, +fp8head, +whole, +states, +hotN, +windowW, +topkN or +stepsN behind tree:N "
    "or auto:N"
)
_WITHOUT_DRAFT: dict[str, dict[str, Any]] = {
    "none": {},
    "graft": {"additional_config": {"graft": "auto"}},
    "graft+memory": {"additional_config": {"graft": {"preset": "auto", "tree": {"memory": True}}}},
}
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

_NUMBERED = re.compile(r"\+(hot|window|topk|steps)([1-9][0-9]{0,9})$")
"""Suffix of a tree's name, with the number that its key of ``graft.tree`` gets."""

_NUMBERED_KEYS = {"hot": "hot_tokens", "window": "draft_window", "topk": "topk", "steps": "steps"}
"""So many tokens are learned that drafts are chosen from, or the draft sees so many tokens; or the
tree has a topk or steps of its own."""


METHODS = ("eagle3", "eagle", "mtp", "dflash", "dspark", "draft_model")
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
    counts, _, by_batch = rest.partition("@")
    options: dict[str, Any] = {}
    if PDL in suffixes:
        inductor = {"triton.enable_pdl": True}
        options["compilation_config"] = {"inductor_compile_config": inductor}
    if (plain := name.removesuffix(PDL)) in _WITHOUT_DRAFT:
        return Arm(name, options | _WITHOUT_DRAFT[plain])
    numbers = [int(count) for count in counts.split(",") if count.isdigit()]
    several = kind in CHAINS
    known = kind in ("tree", "auto") or (not keys and (several or kind == "graft-chain"))
    known |= kind == "ngram" and not keys and FP8 not in suffixes
    if not known or not numbers or ",".join(map(str, numbers)) != counts:
        raise BenchmarkError(f"--arms {name!r}: say {NAMES}")
    if len(numbers) > 1 and not (several and len(set(numbers)) == len(numbers) <= max_num_seqs):
        raise BenchmarkError(
            f"--arms {name!r}: several numbers are for chains, each once, and for no fewer "
            f"requests than numbers ({max_num_seqs} here)"
        )
    if kind == "ngram":
        options["speculative_config"] = {**NGRAM, "num_speculative_tokens": numbers[0]}
        return Arm(name, options)
    speculative: dict[str, Any] = {
        "method": method,
        "model": str(draft),
        "num_speculative_tokens": max(numbers),
    }
    if FP8 in suffixes:
        speculative["quantization"] = "fp8_per_channel"
    options["speculative_config"] = speculative
    if by_batch:
        speculative["num_speculative_tokens_per_batch_size"] = _given(name, by_batch)
    speculative |= CHAINS.get(kind, {})
    if several and len(numbers) > 1:
        speculative["num_speculative_tokens_per_batch_size"] = ranges(numbers, max_num_seqs)
        options["scheduler_cls"] = SCHEDULER
        return Arm(name, options, tuple(numbers))
    if kind == "graft-chain":
        options["additional_config"] = {"graft": {"draft": {}}}
    elif not several:
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


def _given(name: str, by_batch: str) -> Any:
    try:
        return json.loads(by_batch)
    except ValueError as wrong:
        raise BenchmarkError(
            f"--arms {name!r}: what stands behind @ is no JSON ({wrong}): say it like "
            "[[1,4,15],[5,8,3]]"
        ) from None


def with_options(own: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """An arm's own options of ``vllm.LLM``, and those that all arms are given."""
    found = {**more, **own}
    for key in ("additional_config", "compilation_config"):
        if key in more:
            found[key] = more[key] | own.get(key, {})
    return found


def read_arms(arguments: argparse.Namespace) -> list[Arm]:
    """The arms that the arguments name.

    Raises:
        BenchmarkError: an arm can't be read.
    """
    draft = draft_folder(arguments.pair, arguments.method)
    arms = []
    for name in arguments.arms:
        steps = arguments.auto_steps if name.startswith("auto:") else arguments.steps
        largest = max(arguments.requests_in_flight)
        arms.append(read_arm(name, draft, arguments.topk, steps, largest, arguments.method))
    return arms


def engine_options(arm: Arm, arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of ``vllm.LLM`` for an arm."""
    options = with_options(arm.options, arguments.options)
    options["max_model_len"] = arguments.max_model_len
    options["max_num_seqs"] = max(arguments.requests_in_flight)
    if arguments.fp8_target:
        options |= {"quantization": "fp8_per_channel", "kv_cache_dtype": "fp8"}
    if arguments.kv_cache_bytes:
        options["kv_cache_memory_bytes"] = arguments.kv_cache_bytes
    if arguments.sizes:
        compilation = options.get("compilation_config", {})
        options["compilation_config"] = compilation | {"cudagraph_capture_sizes": arguments.sizes}
    return options


def start(arms: list[Arm], arguments: argparse.Namespace, load: Load) -> dict[Arm, Connection]:
    """Start the engines of arms; each answers a `Case`, an `Ask` or a `Call`."""
    told = [replace(arm, options=engine_options(arm, arguments)) for arm in arms]
    loop = partial(WatchedLoop, prompts=load.requests, says_paces=arguments.paces)
    started = arm_processes.start(told, arguments.pair / "target", loop)
    pipes = dict(zip(arms, started.values()))
    for arm, pipe in pipes.items() if any(load.answers.values()) else ():
        pipe.send(Call(replay, (load.answers,)))
        arm_processes.answer(arm, pipe)
    return pipes


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the pair, and what its engines are told."""
    parser.add_argument("pair", type=Path)
    parser.add_argument("--method", choices=METHODS, default="eagle3", help="of the draft")
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--auto-steps", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=400, help="characters of a prompt")
    parser.add_argument("--fp8-target", action="store_true", help="FP8 target and K/V in all arms")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--sizes", nargs="+", type=int, help="cudagraph_capture_sizes of all arms")
    told = "of each engine; they start together then"
    parser.add_argument("--kv-cache-bytes", type=int, help=told)
    told = "workloads' answers are the target's own, which can follow instructions"
    parser.add_argument("--own-answers", action="store_true", help=told)
    told = "print how long each kind of step took in each window"
    parser.add_argument("--paces", action="store_true", help=told)
    Choice.add_flags(parser)
    told = "JSON: more options of vllm.LLM for all arms"
    parser.add_argument("--options", type=json.loads, default={}, help=told)
