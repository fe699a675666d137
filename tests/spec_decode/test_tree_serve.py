"""`vllm serve` with the tree, on a CPU: real processes, real flags, the OpenAI API."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest
import torch
from openai import DefaultHttpxClient, OpenAI

from tests.support.shipped_pair import SHIPPED
from vllm_graft.testing.pair_server import MODEL, server_settings, settled_counters, speculate
from vllm_graft.testing.pairs import Answer, Request
from vllm_graft.testing.vllm_server import ServerError, VllmServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

TREE = [
    *speculate(SHIPPED, 15),
    *("--additional-config.graft.tree.topk", "4", "--additional-config.graft.tree.steps", "5"),
    *("--additional-config.graft.tree.shape", "auto"),
    *("--additional-config.graft.tree.hot_tokens", "256"),
]


def prepared() -> bool:
    """Whether spawned processes find the interpreter, and `vllm serve` its own version."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return False
    return importlib.util.find_spec("_vllm_graft_startup") is not None


if torch.cuda.is_available():
    pytest.skip("vllm serve on a CPU", allow_module_level=True)
if not prepared():
    pytest.skip("run `python -m vllm_graft.testing.environment` first", allow_module_level=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    flags, environment = server_settings(SHIPPED, cuda=False)
    log = tmp_path_factory.mktemp("serve") / "log"
    environment = {**environment, "VLLM_LOGGING_LEVEL": "INFO"}
    with VllmServer([*flags, *TREE], log, environment) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def client(server: VllmServer) -> Iterator[OpenAI]:
    # A proxy of the environment must not see the loopback interface.
    http = DefaultHttpxClient(trust_env=False)
    with OpenAI(base_url=f"{server.address}/v1", api_key="none", http_client=http) as client:
        yield client


def complete(client: OpenAI, request: Request, stream: bool) -> tuple[str, list[int]]:
    """Text and token ids of an answer."""
    answer = client.completions.create(
        model=MODEL,
        prompt=request.prompt,
        stream=stream,
        extra_body={"ignore_eos": True, "return_token_ids": True},
        **{"temperature": 1.0, **request.params},
    )
    parts = [part.choices[0] for part in (answer if stream else [answer])]
    return "".join(part.text for part in parts), [t for part in parts for t in part.token_ids or []]


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_those_of_the_target_alone(
    server: VllmServer,
    client: OpenAI,
    samples: list[Request],
    expected: list[Answer],
    stream: bool,
) -> None:
    before = server.counters()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda request: complete(client, request, stream), samples[2:6]))
    assert found == [(answer.texts[0], answer.tokens[0]) for answer in expected[2:6]]
    counters = settled_counters(server) - before
    assert counters.drafts > 0
    assert counters.accepted > 0


def test_steps_are_measured_though_the_engine_loads_plugins_late(server: VllmServer) -> None:
    # `vllm serve` spawns the engine's process: nothing of ours is there when it begins.
    assert "vllm-graft measured steps of" in server.log.read_text()


def test_misspelt_key_ends_the_server_before_it_loads_a_model(tmp_path: Path) -> None:
    flags, environment = server_settings(SHIPPED, cuda=False)
    wrong = [flag.replace("tree.topk", "tree.topkk") for flag in TREE]
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
