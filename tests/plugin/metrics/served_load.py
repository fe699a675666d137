"""A load for a server, what its client counts, and where the server's counters say otherwise."""

import json
import random
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tests.support.engines.pair_server import MODEL
from tests.support.engines.vllm_server import VllmServer
from vllm_graft.metrics.server_info import total

SETTLE_SECONDS = 30.0


def load() -> list[dict[str, Any]]:
    """Requests, some of which repeat a prompt, and one of which gets trees of one branch."""
    numbers = random.Random(17)
    prompts = [[numbers.randrange(5, 500) for _ in range(100)] for _ in range(5)]
    plain = [{"prompt": prompt} for prompt in prompts]
    others = [
        {"prompt": prompts[0][:20], "repetition_penalty": 1.2},
        {"prompt": prompts[1][:20], "presence_penalty": 0.5, "temperature": 1.0, "seed": 3},
        {"prompt": prompts[2][:20], "thinking_token_budget": 4},
    ]
    # The prompts come again when the device has given their blocks away.
    return [*plain, *others, *plain]


@dataclass
class Counted:
    """What a client counts from the answers: verified trees, and accepted nodes by depth."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    trees: int = 0
    nodes: int = 0
    by_depth: Counter[int] = field(default_factory=Counter)

    def add(self, answer: dict[str, Any]) -> None:
        """Count an answer; the server was asked for its metrics of drafts per request."""
        usage, drafts = answer["usage"], answer["metrics"]["speculative_decoding"]
        self.requests += 1
        self.prompt_tokens += usage["prompt_tokens"]
        self.completion_tokens += usage["completion_tokens"]
        self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"] or 0
        self.trees += drafts["num_spec_steps"]
        self.nodes += drafts["num_draft_tokens"]
        for path, number in enumerate(drafts["acceptance_histogram"]):
            self.by_depth.update(dict.fromkeys(range(1, path + 1), number))

    def differences(self, metrics: str) -> list[str]:
        """Counters of a server's page of metrics that say otherwise."""
        ours, theirs = "vllm:graft_", "vllm:spec_decode_num_"
        hits = ("vllm:prefix_cache_hits", f"{ours}hicache_hit_tokens_host")
        hits += (f"{ours}hicache_hit_tokens_storage",)
        found = {
            "requests": (total(metrics, "vllm:request_success_total"), self.requests),
            "prompt": (total(metrics, "vllm:prompt_tokens_total"), self.prompt_tokens),
            "answers": (total(metrics, "vllm:generation_tokens_total"), self.completion_tokens),
            "hits": (sum(total(metrics, f"{name}_total") for name in hits), self.cached_tokens),
            "trees": (total(metrics, f"{ours}tree_trees_total"), self.trees),
            "nodes": (total(metrics, f"{ours}tree_nodes_verified_total"), self.nodes),
            "accepted": (total(metrics, f"{ours}tree_nodes_accepted_total"), self.by_depth.total()),
            "vLLM's drafts": (total(metrics, f"{theirs}drafts_total"), self.trees),
            "vLLM's draft tokens": (total(metrics, f"{theirs}draft_tokens_total"), self.nodes),
            "failures": (total(metrics, f"{ours}metrics_errors_total"), 0),
        }
        for depth in range(1, 1 + max(self.by_depth, default=0)):
            name = f"{ours}tree_nodes_accepted_by_depth_total"
            told = total(metrics, name, depth=str(depth))
            found[f"depth {depth}"] = told, self.by_depth[depth]
            name = f"{theirs}accepted_tokens_per_pos_total"
            told = total(metrics, name, position=str(depth - 1))
            found[f"vLLM's place {depth}"] = told, self.by_depth[depth]
        return [
            f"{what}: the server counted {told:g}, the client {counted}"
            for what, (told, counted) in found.items()
            if told != counted
        ]


def ask(server: VllmServer, request: dict[str, Any]) -> dict[str, Any]:
    """Send a request over a connection of its own, which any API server may take."""
    body = {"model": MODEL, "max_tokens": 10, "temperature": 0, "ignore_eos": True, **request}
    asked = urllib.request.Request(
        f"{server.address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Connection": "close"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(asked, timeout=300) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer


def serve(server: VllmServer, requests: Sequence[dict[str, Any]], counted: Counted) -> None:
    """Send requests, four at a time, and count the answers."""
    with ThreadPoolExecutor(4) as threads:
        for answer in threads.map(lambda request: ask(server, request), requests):
            counted.add(answer)


def settled(server: VllmServer, counted: Counted) -> str:
    """The page of metrics once it says what the client counted, or does not change any more."""
    end = time.monotonic() + SETTLE_SECONDS
    metrics = server.metrics()
    while counted.differences(metrics) and time.monotonic() < end:
        time.sleep(0.5)
        metrics = server.metrics()
    return metrics
