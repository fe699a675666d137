"""The servers of the fuzz and their flags: one without our parts, and others to compare with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fuzz.compare import Rule
from benchmarks.fuzz.rules import STOCK_CHAIN, WITH_DRAFTS
from benchmarks.fuzz.trouble import ALL
from tests.support.engines.cpu_replicas import REPLICAS
from tests.support.engines.pair_server import server_settings, speculate
from tests.support.engines.shipped_pair import SHIPPED
from vllm_graft.metrics.server_info import total

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


Part = Callable[[Path], list[str]] | list[str]
"""Flags, or what makes them, given a folder of the arm's own."""


@dataclass(frozen=True)
class Life:
    """A server from its start to its end; the next life of an arm finds what it has stored.

    Attributes:
        parts: of its flags.
        target: what it serves, by name (`targets.py`); the reference serves the same.
        rules: known differences, by name.
        reload: the server before goes on instead, and loads this target's weights.
    """

    parts: tuple[Part, ...] = ()
    target: str = "pair"
    rules: Mapping[str, Rule] = field(default_factory=lambda: WITH_DRAFTS)
    reload: bool = False

    def flags(self, folder: Path) -> list[str]:
        """Make the flags, without the target's."""
        made = (part if isinstance(part, list) else part(folder) for part in self.parts)
        return [flag for flags in made for flag in flags]


@dataclass(frozen=True)
class Arm:
    """A server that is compared, or several, one after the other on one storage.

    Attributes:
        busy: counters that have to be over zero at the end; else the arm did not do its work.
        troubles: what disturbs it (`trouble.py`).
    """

    name: str
    lives: tuple[Life, ...]
    busy: tuple[str, ...] = ()
    troubles: tuple[str, ...] = ()

    def flags(self, folder: Path) -> list[str]:
        """Make the flags of the first life."""
        return self.lives[0].flags(folder)

    @property
    def rules(self) -> Mapping[str, Rule]:
        """Known differences of the first life."""
        return self.lives[0].rules

    def disturbances(self) -> tuple[str, ...]:
        """Return `troubles` that the device has: beside a host cache no GPU's engine sleeps."""
        return tuple(name for name in self.troubles if not (name == "sleep" and on_gpu()))

    def idle(self, metrics: str) -> list[str]:
        """List the counters that are zero and should not be."""
        return [name for name in self.busy if total(metrics, name) <= 0]


def arm(name: str, *parts: Part, busy: tuple[str, ...] = (), **more: Any) -> Arm:
    """Return an arm with a single life; `more` are attributes of that."""
    troubles = more.pop("troubles", ())
    return Arm(name, (Life(parts, **more),), busy, troubles)


def on_gpu() -> bool:
    """Return whether the servers run on a GPU, where vLLM has no adapters in float32."""
    import torch

    return bool(torch.cuda.is_available())


def settings() -> tuple[list[str], dict[str, str]]:
    """Return the flags and environment of all servers: float32, prompts in chunks."""
    flags, environment = server_settings(SHIPPED, cuda=on_gpu())
    if on_gpu():
        sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 96]}
        flags += ["--compilation-config", json.dumps(sizes)]
    flags += ["--scheduling-policy", "priority", "--block-size", "32"]
    flags += ["--max-num-batched-tokens", "192", "--chat-template", TEMPLATE]
    # Storage is read whatever was measured of it, which varies too much on a busy CPU.
    environment |= {"VLLM_GRAFT_PREFILL_RATE": "10"}
    # Without this each server binds its threads to the first core, and two servers share it.
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    if not on_gpu():
        environment |= {REPLICAS: "1"}
    # With it a server has resets, RPCs and sleep.
    return flags, {**environment, "VLLM_SERVER_DEV_MODE": "1"}


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
ITSELF = {"method": "draft_model", "model": str(SHIPPED / "target"), "num_speculative_tokens": 3}
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


def stored(**extra: Any) -> Part:
    """Return the flags of a host KV cache, with storage in the arm's folder."""
    return lambda folder: transfer(connector(folder / "store", **extra))


def two(folder: Path) -> list[str]:
    """Return the flags of a `MultiConnector` over two of ours, which have the same engine id."""
    loads = ("async", "layerwise")
    children = [connector(folder / load, load=load, host_bytes=SOME_BYTES) for load in loads]
    extra = {"kv_connector_extra_config": {"connectors": children}}
    return transfer({**connector(folder), "kv_connector": "MultiConnector", **extra})


def data_parallel(folder: Path) -> list[str]:
    """Return the flags of two data-parallel ranks, which share experts whole where vLLM can."""
    # Its kernel for a CPU dies of experts that are another rank's.
    return ["--data-parallel-size", "2", *(["--enable-expert-parallel"] if on_gpu() else [])]


PRESET = ["--additional-config", json.dumps({"graft": "auto"})]
SERVERS = ["--api-server-count", "2"]
FEW, FEWEST, SOME = blocks(FEW_BLOCKS), blocks(FEWEST_BLOCKS), blocks(SOME_BLOCKS)
CHAIN = list(speculate(SHIPPED, 5))
TREE = tree(9, 3)

MODULE = [
    *("--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 4})),
    *("--additional-config", json.dumps({"graft": {"tree": {"nodes": 9, "shape": "auto"}}})),
]
TENSOR_PARALLEL = ["--tensor-parallel-size", "2"]

PLAIN = arm("plain")

ACCEPTED = ("vllm:spec_decode_num_accepted_tokens_total",)
HITS = (f"{HICACHE}hit_tokens_host_total", f"{HICACHE}hit_tokens_storage_total")
STORED = HITS[1:]
PREEMPTED = ("vllm:num_preemptions_total",)
DRAFTS: dict[str, Any] = {"busy": (*ACCEPTED, *PREEMPTED)}
BOTH: dict[str, Any] = {"busy": (*ACCEPTED, *HITS, *PREEMPTED)}
DISTURBED: dict[str, Any] = {"busy": ACCEPTED, "troubles": ALL}
NO_RELOAD = tuple(name for name in ALL if name != "reload")
AGAIN = (SOME, stored(load="async", host_bytes=SOME_BYTES))
LAYERS = (SOME, stored(load="layerwise", host_bytes=SOME_BYTES))


def busy_with(*counters: str) -> dict[str, Any]:
    return {**DRAFTS, "busy": (*ACCEPTED, *PREEMPTED, *counters)}


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        arm("tree", TREE, busy=ACCEPTED),
        arm(
            "auto",
            # Nearly all of the draft's tokens, which therefore hold enough of any text.
            tree(12, 4, shape="auto", hot_tokens=1000, head_dtype="fp8", ngram=True),
            FEWEST,
            **busy_with("vllm:graft_tree_hot_steps_total"),
        ),
        arm(
            "tree-window",
            tree(9, 3, draft_window=20, ngram=True),
            FEWEST,
            **busy_with("vllm:graft_tree_draft_window"),
        ),
        arm(
            "tree-ngram",
            tree(9, 3, ngram=True),
            FEWEST,
            **busy_with("vllm:graft_tree_ngram_nodes_accepted_total"),
        ),
        arm("ngram", tree_of(NGRAMS, 9, 3), FEWEST, **DRAFTS),
        arm("draft-model", tree_of(ITSELF, 7, 3), FEWEST, **DRAFTS),
        arm("host-async", *AGAIN, busy=HITS),
        arm("host-layerwise", *LAYERS, busy=HITS),
        arm("both-async", tree(7, 2), FEW, stored(load="async"), **BOTH),
        arm("both-layerwise", tree(8, 3, shape="auto"), FEW, stored(load="layerwise"), **BOTH),
        arm(
            "all",
            tree(8, 3, shape="auto", hot_tokens=256),
            FEW,
            stored(load="layerwise"),
            busy=(*ACCEPTED, *HITS),
        ),
        arm("multi", SOME, two, busy=HITS),
        arm("ranks", tree(9, 3, shape="auto", ngram=True), FEWEST, TENSOR_PARALLEL, **DRAFTS),
        # Both ranks run each pass, and are preempted at different times.
        arm("replicas", MODULE, FEWEST, data_parallel, target="experts", **DRAFTS),
        arm("chain", CHAIN, rules=STOCK_CHAIN, busy=ACCEPTED),
        # With adapters, embeddings of prompts and thinking budgets.
        arm("rich", tree(9, 3, ngram=True), target="rich", busy=ACCEPTED),
        arm("rich-host", *AGAIN, target="rich", busy=HITS[:1]),
        # A preset behind two API servers, and most parts at once, while they are disturbed.
        arm("preset", list(speculate(SHIPPED, 5)), PRESET, SERVERS, **DISTURBED),
        arm(
            "disturbed",
            tree(9, 3, shape="auto", hot_tokens=256, ngram=True),
            FEW,
            stored(load="async"),
            **DISTURBED,
        ),
        arm(
            "rich-disturbed",
            tree(9, 3, ngram=True),
            *AGAIN,
            target="rich",
            **{**DISTURBED, "troubles": NO_RELOAD},
        ),
        # Several lives on one storage: answers have to be those of the weights that are served.
        Arm(
            "weights",
            (
                Life(AGAIN),
                Life(target="noisy", reload=True),
                Life(AGAIN),
                Life(AGAIN, "noisy"),
                Life(AGAIN, "rotated"),
            ),
            busy=STORED,
        ),
        Arm(
            "flags",
            (
                Life((CHAIN, *AGAIN), rules=STOCK_CHAIN),
                Life((TREE, *AGAIN)),
                Life(LAYERS),
                Life((TREE, *AGAIN), "rotated"),
                Life((CHAIN, *LAYERS), rules=STOCK_CHAIN),
            ),
            busy=STORED,
        ),
    )
}
