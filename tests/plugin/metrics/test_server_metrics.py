"""``vllm serve`` on a CPU: answers, and counters that equal what a client counts.

There are one and two API servers.
"""

import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import DefaultHttpxClient, OpenAI
from prometheus_client.mmap_dict import MmapedDict

from tests.plugin.metrics.served_load import Counted, load, serve, settled
from tests.support.answers.dashboard import without_data
from tests.support.engines.cache_engines import transfer
from tests.support.engines.pair_server import (
    MODEL,
    require_cpu_server,
    server_settings,
    speculate,
)
from tests.support.engines.pairs import Answer, Request
from tests.support.engines.shipped_pair import SHIPPED
from tests.support.engines.vllm_server import VllmServer
from vllm_graft.metrics import server_info
from vllm_graft.metrics.server_info import samples, total

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(590)]

QUICK = (sys.executable, "-P", "-m", "tests.support.engines.quick_processes")
TREE = {"topk": 3, "steps": 3}
STATES = {"tree": "on", "hicache": "on", "vit": "off", "draft": "off", "learn": "off"}


require_cpu_server()


def flags(folder: Path, api_servers: int) -> tuple[list[str], dict[str, str]]:
    """Flags of a server with trees and a host cache over few device blocks."""
    found, environment = server_settings(SHIPPED, cuda=False)
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    environment |= {"VLLM_LOG_STATS_INTERVAL": "2", "VLLM_LOGGING_LEVEL": "INFO"}
    storage = {"backend": "segments", "path": str(folder / "store"), "max_bytes": "64MiB"}
    # Storage is read whatever was measured of it, which varies too much on a busy CPU.
    environment |= {"VLLM_GRAFT_PREFILL_RATE": "10"}
    cache = transfer(host_bytes="6MiB", storage=storage)
    found += ["--block-size", "32", "--num-gpu-blocks-override", "20"]
    found += [*speculate(SHIPPED, 7), "--additional-config", json.dumps({"graft": {"tree": TREE}})]
    found += ["--kv-transfer-config", json.dumps(cache), "--enable-prompt-tokens-details"]
    found += ["--per-request-spec-decode-metrics", "summary"]
    # With it, requests may have a thinking budget.
    marks = {"reasoning_start_str": "self", "reasoning_end_str": "return"}
    found += ["--reasoning-config", json.dumps(marks)]
    return [*found, "--api-server-count", str(api_servers)], environment


def logged(server: VllmServer, text: str) -> str:
    """The server's log, once it has a text that vLLM logs every few seconds."""
    end = time.monotonic() + 30
    while text not in server.log.read_text() and time.monotonic() < end:
        time.sleep(0.5)
    found = server.log.read_text()
    assert text in found
    return found


def parts_of(server: VllmServer) -> dict[str, str]:
    """The states that `vllm-graft info` reads from a page."""
    return {part.part: part.state for part in server_info.read(server.metrics()).parts}


Said = tuple[str, list[int]]


def completions(server: VllmServer, requests: list[Request], stream: bool) -> list[Said]:
    """Texts and tokens that OpenAI's client gets, four at a time."""

    def complete(request: Request) -> Said:
        answer: Any = client.completions.create(
            model=MODEL,
            prompt=request.prompt,
            stream=stream,
            extra_body={"ignore_eos": True, "return_token_ids": True},
            **{"temperature": 1.0, **request.params},
        )
        parts = [part.choices[0] for part in (answer if stream else [answer])]
        tokens = [token for part in parts for token in part.token_ids or []]
        return "".join(part.text for part in parts), tokens

    # A proxy of the environment must not see the loopback interface.
    http = DefaultHttpxClient(trust_env=False)
    with (
        OpenAI(base_url=f"{server.address}/v1", api_key="none", http_client=http) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        return list(pool.map(complete, requests))


def spoilt(metrics: str, name: str) -> str:
    """The page with one more in the first sample of a counter that is not zero."""
    found = re.search(rf"^{name}(\{{.*\}})? (?!0\.0$)(\S+)$", metrics, re.MULTILINE)
    assert found is not None, name
    more = f"{found[0][: -len(found[2])]}{float(found[2]) + 1}"
    return metrics.replace(found[0], more)


def test_one_api_server_counts_what_its_client_counts(
    tmp_path: Path, samples: list[Request], expected: list[Answer]
) -> None:
    """Its answers are those of the target alone."""
    arguments, environment = flags(tmp_path, 1)
    counted = Counted()
    with VllmServer(arguments, tmp_path / "log", environment, QUICK) as server:
        server.wait_ready(400)
        # Before the first request: the engine has told which parts run.
        assert parts_of(server) == STATES
        serve(server, load(), counted)
        metrics = settled(server, counted)
        assert server_info.ask(server.address).is_well
        assert parts_of(server) == STATES
        log = logged(server, "Per-depth acceptance rate: ")
        for stream in (False, True):
            assert completions(server, samples[2:6], stream) == [
                (answer.texts[0], answer.tokens[0]) for answer in expected[2:6]
            ]
    assert counted.differences(metrics) == []
    assert counted.cached_tokens > 100
    assert counted.by_depth[2] > 0
    assert total(metrics, "vllm:graft_hicache_hit_tokens_host_total") > 0
    # A part that is off has no series, and one that is on has all that the dashboard shows.
    assert without_data(metrics, "", "tree", "hicache") == []
    assert "vllm:graft_vit_" not in metrics
    steps = total(metrics, "vllm:graft_tree_steps_total")
    assert total(metrics, "vllm:graft_tree_nodes_per_tree_count") == steps <= counted.trees
    assert total(metrics, "vllm:graft_tree_target_launches_total") == steps
    assert total(metrics, "vllm:graft_tree_draft_launches_total", reason="uncaptured") > steps
    assert total(metrics, "vllm:graft_tree_candidates_drafted_total") > counted.nodes
    assert "metrics are incomplete" not in log
    # vLLM's own line would divide by all nodes.
    assert "Avg Draft acceptance rate" not in log
    # Negative control: each counter that is wrong by one is noticed.
    for name in (
        "vllm:generation_tokens_total",
        "vllm:graft_tree_trees_total",
        "vllm:graft_tree_nodes_accepted_by_depth_total",
        "vllm:graft_hicache_hit_tokens_host_total",
    ):
        assert counted.differences(spoilt(metrics, name)) != []


def serving(folder: Path) -> set[str]:
    """Process ids of the API servers that have generated tokens, from Prometheus' files."""
    found = set()
    for file in folder.glob("counter_*.db"):
        for key, value, *_ in MmapedDict.read_all_values_from_file(str(file)):
            if "vllm:generation_tokens" in key and "_created" not in key and value > 0:
                found.add(file.stem.removeprefix("counter_"))
    return found


@pytest.mark.nightly
def test_two_api_servers_count_together_what_their_client_counts(tmp_path: Path) -> None:
    arguments, environment = flags(tmp_path, 2)
    folder = tmp_path / "prometheus"
    folder.mkdir()
    environment |= {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
    counted = Counted()
    with VllmServer(arguments, tmp_path / "log", environment, QUICK) as server:
        server.wait_ready(500)
        assert parts_of(server) == STATES
        serve(server, load(), counted)
        for _ in range(20):
            if len(serving(folder)) == 2:
                break
            serve(server, load()[:4], counted)
        metrics = settled(server, counted)
        assert parts_of(server) == STATES
    assert len(serving(folder)) == 2, "one API server answered all requests"
    assert counted.differences(metrics) == []
    assert without_data(metrics, "", "tree", "hicache") == []
    # No series is told once per process.
    ours: list[Any] = [each for each in samples(metrics) if "graft" in each.name]
    assert len(ours) > 50
    assert not [each for each in ours if "pid" in each.labels]
