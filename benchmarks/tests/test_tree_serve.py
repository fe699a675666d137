"""`vllm serve` with most of our parts, on a CPU: real processes, real flags, the OpenAI API."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.fuzz.arms import ARMS, PLAIN, Arm, settings
from benchmarks.fuzz.compare import Judge
from benchmarks.fuzz.requests import World, generate
from benchmarks.fuzz.server import answers, compare_all, corrupted, gap_by
from benchmarks.fuzz.server import main as fuzz
from tests.support.engines.pair_server import require_cpu_server, server_settings, speculate
from tests.support.engines.shipped_pair import SHIPPED
from tests.support.engines.vllm_server import ServerError, VllmServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

ARM = ARMS["all"]
"""Trees of `tree: auto`, hot tokens, and the host KV cache with storage."""
REQUESTS = 150


require_cpu_server()


@contextlib.contextmanager
def served(arm: Arm, folder: Path) -> Iterator[VllmServer]:
    """Run a server with an arm's parts."""
    flags, environment = settings()
    environment |= {"VLLM_LOGGING_LEVEL": "INFO"}
    with VllmServer([*flags, *arm.flags(folder)], folder / "log", environment) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A server with our parts."""
    with served(ARM, tmp_path_factory.mktemp(ARM.name)) as server:
        yield server


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A server without them."""
    with served(PLAIN, tmp_path_factory.mktemp(PLAIN.name)) as server:
        yield server


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_requests_are_answered_as_without_our_parts(
    server: VllmServer, plain: VllmServer
) -> None:
    requests = generate(7, REQUESTS, World.of_pair(longest=8))
    with ThreadPoolExecutor(2) as pool:
        found, expected = pool.map(lambda each: answers(each, requests, 10), (server, plain))
    judge = Judge(gap_by(plain.port), ARM.rules)
    result = compare_all(ARM.name, judge, requests, expected, found)
    assert result.failed == {}
    assert result.rules["equal"] > 0.75 * REQUESTS
    assert ARM.idle(server.metrics()) == []
    # This is the negative control: one token in a hundred is altered.
    numbers = random.Random(1)
    compared = [r.exact and r.abort_after is None for r in requests]
    altered = [corrupted(a, numbers, 100) and it for a, it in zip(found, compared)]
    wrong = compare_all(ARM.name, judge, requests, expected, found).failed
    assert sum(altered) > 3
    assert wrong.keys() >= {r.number for r, was in zip(requests, altered) if was}


@pytest.mark.nightly
def test_misspelt_key_ends_the_server_before_it_loads_a_model(tmp_path: Path) -> None:
    flags, environment = server_settings(SHIPPED, cuda=False)
    wrong = [*speculate(SHIPPED, 15), "--additional-config.graft.tree.topkk", "4"]
    with (
        VllmServer([*flags, *wrong], tmp_path / "log", environment) as server,
        pytest.raises(ServerError, match="exit code 1") as failure,
    ):
        server.wait_ready(every=60)
    log = (tmp_path / "log").read_text()
    message = "--additional-config.graft.tree.topkk: unknown key. Did you mean 'topk'?"
    assert message in log
    assert message in str(failure.value)
    assert "Loading" not in log


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_the_other_rank_s_requests_end_when_a_rank_is_killed(tmp_path: Path) -> None:
    """Data-parallel ranks with experts wait for each other in every pass."""
    log = tmp_path / "log"
    flags = ["--requests", "60", "--flood", "0", "--workers", "6", "--kill", "15"]
    arm = ["--seed", "55", "--arms", "replicas", "--out", str(tmp_path / "out"), "--log", str(log)]
    assert fuzz([*flags, *arm]) == 0, log.read_text()
    assert json.loads(log.read_text())["rules"]["ended by the kill"] > 6
