"""The servers of the fuzz and their flags: one without our parts, and others to compare with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fuzz.compare import Rule
from benchmarks.fuzz.rules import ALWAYS, STOCK_CHAIN, WITH_DRAFTS
from tests.support.shipped_pair import SHIPPED
from vllm_graft.testing.pair_server import server_settings, speculate
from vllm_graft.testing.vllm_server import sum_of

TEMPLATE = (
    "{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant: {% endif %}"
)
HICACHE = "vllm:graft_hicache_"
FEW_BLOCKS = 28
"""Too few blocks (of 32 tokens) for eight requests of the fuzz, so that some are preempted."""
FEWEST_BLOCKS = 18
"""Little more than one request of the longest needs."""
SOME_BLOCKS = 96
"""Blocks for eight requests and little more, so that shared prefixes come from the host."""
FEW_BYTES = "6MiB"
"""Host memory for 64 pages, more than `FEW_BLOCKS`."""
SOME_BYTES = "12MiB"
"""Host memory for 128 pages, more than `SOME_BLOCKS`: evicted blocks stay there for a while."""


@dataclass(frozen=True)
class Arm:
    """A server that is compared.

    Attributes:
        flags: makes the flags, given a folder of the arm's own.
        rules: known differences, by name.
        busy: counters that have to be over zero at the end; else the arm did not do its work.
    """

    name: str
    flags: Callable[[Path], list[str]]
    rules: Mapping[str, Rule] = field(default_factory=lambda: ALWAYS)
    busy: tuple[str, ...] = ()

    def idle(self, metrics: str) -> list[str]:
        """List the counters that are zero and should not be."""
        return [name for name in self.busy if sum_of(name, metrics) <= 0]


def settings() -> tuple[list[str], dict[str, str]]:
    """Return the flags and environment of all servers: float32 on a CPU, prompts in chunks."""
    flags, environment = server_settings(SHIPPED, cuda=False)
    flags += ["--scheduling-policy", "priority", "--block-size", "32"]
    flags += ["--max-num-batched-tokens", "192", "--chat-template", TEMPLATE]
    # Storage is read whatever was measured of it, which varies too much on a busy CPU.
    environment |= {"VLLM_GRAFT_PREFILL_RATE": "10"}
    # Without this each server binds its threads to the first core, and two servers share it.
    return flags, {**environment, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def tree(nodes: int, topk: int, **keys: Any) -> list[str]:
    """Return flags of a tree, which is small: each node is a row of interpreted kernels."""
    config = {"graft": {"tree": {"topk": topk, "steps": 4, **keys}}}
    return [*speculate(SHIPPED, nodes), "--additional-config", json.dumps(config)]


def tree_of(method: Mapping[str, Any], nodes: int, topk: int) -> list[str]:
    """Return flags of a tree that another drafter than the pair's head grows."""
    config = {"graft": {"tree": {"topk": topk, "nodes": nodes}}}
    return [
        "--speculative-config",
        json.dumps(dict(method)),
        "--additional-config",
        json.dumps(config),
    ]


NGRAMS = {
    "method": "ngram_gpu",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 4,
}
"""Matches of one token are wrong most of the time, so that trees of all forms are verified."""
ITSELF = {
    "method": "draft_model",
    "model": str(SHIPPED / "target"),
    "num_speculative_tokens": 3,
}
"""The target drafts for itself, so that nearly all that it drafts is accepted."""


def blocks(count: int) -> list[str]:
    return ["--num-gpu-blocks-override", str(count)]


def connector(folder: Path, **extra: Any) -> dict[str, Any]:
    """Configure a host KV cache with storage in `folder`."""
    storage = {"backend": "segments", "path": str(folder), "max_bytes": "256MiB"}
    extra = {"host_bytes": FEW_BYTES, "storage": storage, **extra}
    return {
        "kv_connector": "HiCacheConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def transfer(config: Mapping[str, Any]) -> list[str]:
    return ["--kv-transfer-config", json.dumps(config)]


def two(folder: Path) -> dict[str, Any]:
    """Configure a `MultiConnector` over two of ours, which have the same engine id."""
    children = [
        connector(folder / load, load=load, host_bytes=SOME_BYTES)
        for load in ("async", "layerwise")
    ]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }


PLAIN = Arm("plain", lambda folder: [])

ACCEPTED = ("vllm:spec_decode_num_accepted_tokens_total",)
HITS = (f"{HICACHE}hit_tokens_host_total", f"{HICACHE}hit_tokens_storage_total")
PREEMPTED = ("vllm:num_preemptions_total",)

ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("tree", lambda folder: tree(9, 3), rules=WITH_DRAFTS, busy=ACCEPTED),
        Arm(
            "auto",
            # Nearly all of the draft's tokens, which therefore hold enough of any text.
            lambda folder: [
                *tree(12, 4, shape="auto", hot_tokens=1000, head_dtype="fp8", ngram=True),
                *blocks(FEWEST_BLOCKS),
            ],
            rules=WITH_DRAFTS,
            busy=(*ACCEPTED, *PREEMPTED, "vllm:graft_tree_hot_steps_total"),
        ),
        Arm(
            "tree-window",
            lambda folder: [*tree(9, 3, draft_window=20, ngram=True), *blocks(FEWEST_BLOCKS)],
            rules=WITH_DRAFTS,
            busy=(*ACCEPTED, *PREEMPTED, "vllm:graft_tree_draft_window"),
        ),
        Arm(
            "tree-ngram",
            lambda folder: [*tree(9, 3, ngram=True), *blocks(FEWEST_BLOCKS)],
            rules=WITH_DRAFTS,
            busy=(*ACCEPTED, *PREEMPTED, "vllm:graft_tree_ngram_nodes_accepted_total"),
        ),
        Arm(
            "ngram",
            lambda folder: [*tree_of(NGRAMS, 9, 3), *blocks(FEWEST_BLOCKS)],
            rules=WITH_DRAFTS,
            busy=(*ACCEPTED, *PREEMPTED),
        ),
        Arm(
            "draft-model",
            lambda folder: [*tree_of(ITSELF, 7, 3), *blocks(FEWEST_BLOCKS)],
            rules=WITH_DRAFTS,
            busy=(*ACCEPTED, *PREEMPTED),
        ),
        Arm(
            "host-async",
            lambda folder: [
                *blocks(SOME_BLOCKS),
                *transfer(connector(folder / "store", load="async", host_bytes=SOME_BYTES)),
            ],
            busy=HITS,
        ),
        Arm(
            "host-layerwise",
            lambda folder: [
                *blocks(SOME_BLOCKS),
                *transfer(connector(folder / "store", load="layerwise", host_bytes=SOME_BYTES)),
            ],
            busy=HITS,
        ),
        Arm(
            "both-async",
            lambda folder: [
                *tree(7, 2),
                *blocks(FEW_BLOCKS),
                *transfer(connector(folder / "store", load="async")),
            ],
            rules=WITH_DRAFTS,
            busy=(*ACCEPTED, *HITS, *PREEMPTED),
        ),
        Arm(
            "both-layerwise",
            lambda folder: [
                *tree(8, 3, shape="auto"),
                *blocks(FEW_BLOCKS),
                *transfer(connector(folder / "store", load="layerwise")),
            ],
            rules=WITH_DRAFTS,
            busy=(*ACCEPTED, *HITS, *PREEMPTED),
        ),
        Arm(
            "all",
            lambda folder: [
                *tree(8, 3, shape="auto", hot_tokens=256),
                *blocks(FEW_BLOCKS),
                *transfer(connector(folder / "store", load="layerwise")),
            ],
            rules=WITH_DRAFTS,
            busy=(*ACCEPTED, *HITS),
        ),
        Arm(
            "multi",
            lambda folder: [*blocks(SOME_BLOCKS), *transfer(two(folder))],
            busy=HITS,
        ),
        Arm(
            "chain",
            lambda folder: list(speculate(SHIPPED, 5)),
            STOCK_CHAIN,
            ACCEPTED,
        ),
    )
}
