"""Prefill and decode on two servers, with trees: answers and acceptance beside one server's.

    python -m benchmarks.split tests/pair --requests 50

PAIR holds `target/`, `eagle3/` and `prompts.json`, as `tests/pair` does. One `vllm serve` answers
requests alone; then a prefiller and a decoder answer them together over a KV connector on the
loopback interface, as vLLM's proxies ask for it: the prefiller computes a prompt and one token, the
decoder gets its K/V, that of the draft's layers too, and goes on. Each request is a dialogue of
`--turns` questions, the answer to one being part of the next. With `--back` the decoder's K/V
returns to the prefiller for the next question, which only NIXL does: rows of drafts that were not
accepted would be offered there.

The status is 1 if answers differ, if the acceptance length differs by more than 2 %, or if no
K/V came from elsewhere. `--fault` lets connectors see rows of drafts: then it has to be 1.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.engines.pair_server import MODEL, server_settings, settled_counters, speculate
from tests.support.engines.pairs import Pair
from tests.support.engines.vllm_server import VllmServer, free_port
from vllm_graft.metrics.server_info import total

FAULT = """
def plant():
    from vllm_graft.spec_decode import tree_part

    tree_part.count_accepted = tree_part.hold_saves = lambda _: None
"""
"""A plugin of vLLM's that takes away what hides rows of drafts from connectors."""
FOREIGN = "vllm:external_prefix_cache_hits_total"
TOLERANCE = 0.02


@dataclass(frozen=True)
class Dialogue:
    """Questions of one user, and how they are answered."""

    questions: tuple[str, ...]
    params: dict[str, Any]


@dataclass(frozen=True)
class Found:
    """What servers answered, a list of token ids for each question, and how drafts fared."""

    answers: list[list[list[int]]]
    acceptance: float
    foreign: float
    """Tokens whose K/V came from elsewhere."""


def dialogues(pair: Pair, count: int, turns: int, seed: int) -> list[Dialogue]:
    """Draw dialogues: half of them are greedy, the others have a temperature and a seed."""
    numbers = random.Random(seed)
    drawn = []
    for number in range(count):
        text = " ".join(numbers.sample(pair.prompts, 2))
        questions = tuple(
            text[(begin := numbers.randrange(len(text) // 2)) : begin + numbers.randrange(60, 160)]
            for _ in range(turns)
        )
        params: dict[str, Any] = {"max_tokens": numbers.randrange(4, 40), "temperature": 0.0}
        if number % 2:
            params |= {"temperature": 0.8, "seed": numbers.randrange(2**31)}
        if number % 3 == 0:
            params["stop"] = [numbers.choice(("\n", ")", "e"))]
        drawn.append(Dialogue(questions, params))
    return drawn


def ask(server: VllmServer, prompt: list[int], **body: Any) -> dict[str, Any]:
    """Return a server's answer to a prompt, with its token ids."""
    body = {"model": MODEL, "prompt": prompt, "return_token_ids": True, **body}
    response = httpx.post(f"{server.address}/v1/completions", json=body, timeout=600)
    response.raise_for_status()
    found: dict[str, Any] = response.json()
    return found


def answer(servers: Sequence[VllmServer], dialogue: Dialogue) -> list[list[int]]:
    """Answer a dialogue by one server, or by a prefiller and a decoder."""
    *prefillers, decoder = servers
    text: list[int] = []
    answers: list[list[int]] = []
    # What the decoder says of the K/V that it has, if it lets a prefiller have it.
    returned: dict[str, Any] = {}
    for question in dialogue.questions:
        text += tokens(decoder, question, begins=not text)
        more: dict[str, Any] = {}
        for prefiller in prefillers:
            # Its token is not used, and an end there would end the dialogue.
            first = {**dialogue.params, "max_tokens": 1, "stop": None}
            wanted = {**returned, "do_remote_decode": True, "do_remote_prefill": False}
            done = ask(prefiller, text, kv_transfer_params=wanted, **first)
            more = {"kv_transfer_params": done["kv_transfer_params"]}
        done = ask(decoder, text, **dialogue.params, **more)
        returned = done.get("kv_transfer_params") or {}
        answers.append(done["choices"][0]["token_ids"])
        text += answers[-1]
    return answers


def tokens(server: VllmServer, text: str, *, begins: bool) -> list[int]:
    """The tokens of a part of a dialogue."""
    body = {"model": MODEL, "prompt": text, "add_special_tokens": begins}
    response = httpx.post(f"{server.address}/tokenize", json=body, timeout=60)
    found: list[int] = response.raise_for_status().json()["tokens"]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    pair = Pair.load(options.pair)
    asked = dialogues(pair, options.requests, options.turns, options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    alone = with_servers(options, asked, split=False)
    split = with_servers(options, asked, split=True)
    differing = sum(one != two for one, two in zip(alone.answers, split.answers))
    drift = split.acceptance / alone.acceptance - 1
    result = {
        "requests": len(asked),
        "differing": differing,
        "acceptance_alone": round(alone.acceptance, 4),
        "acceptance_split": round(split.acceptance, 4),
        "drift": round(drift, 4),
        "foreign_tokens": split.foreign,
    }
    print(json.dumps(result))
    return int(bool(differing) or abs(drift) > TOLERANCE or not split.foreign)


def with_servers(options: argparse.Namespace, asked: Sequence[Dialogue], split: bool) -> Found:
    """Start one server or two, and ask them all."""
    names = ("prefiller", "decoder") if split else ("alone",)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving(options, name)) for name in names]
        for server in servers:
            server.wait_ready(timeout=600, every=60)
        with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
            answers = list(pool.map(functools.partial(answer, servers), asked))
        counters = settled_counters(servers[-1])
        # Where a decoder begins, it computes the prompt's last token beside placeholders for
        # drafts, which vLLM counts as drafts: those of a chain too.
        drafts = counters.drafts - split * sum(map(len, answers))
        acceptance = 1 + counters.accepted / max(1, drafts)
        foreign = sum(total(server.metrics(), FOREIGN) for server in servers)
    return Found(answers, acceptance, foreign)


@contextlib.contextmanager
def serving(options: argparse.Namespace, name: str) -> Iterator[VllmServer]:
    """A server with trees, and with a connector unless it is alone."""
    import torch

    flags, environment = server_settings(options.pair, cuda=torch.cuda.is_available())
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    flags += [*speculate(options.pair, options.nodes), "--block-size", "32"]
    if not options.chain:
        tree = {"topk": 3, "steps": 4}
        flags += ["--additional-config", json.dumps({"graft": {"tree": tree}})]
    if name != "alone":
        # On a busy CPU a step takes seconds.
        extra: dict[str, Any] = {"kv_lease_duration": 600}
        if options.back:
            extra |= {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 1}
        transfer = {
            "kv_connector": options.connector,
            "kv_role": "kv_both",
            "kv_buffer_device": "cuda" if torch.cuda.is_available() else "cpu",
            "kv_connector_extra_config": extra,
        }
        flags += ["--kv-transfer-config", json.dumps(transfer)]
        environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
        if options.fault:
            places = [str(faulty(options.out)), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(places)
    with VllmServer(flags, options.out / f"{name}.log", environment) as server:
        yield server


def faulty(folder: Path) -> Path:
    """Write the plugin that plants the fault; return what ``PYTHONPATH`` has to name."""
    folder = folder / "fault"
    named = folder / "split_fault-0.dist-info"
    named.mkdir(parents=True, exist_ok=True)
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: split-fault\nVersion: 0\n")
    (named / "entry_points.txt").write_text("[vllm.general_plugins]\nfault = split_fault:plant\n")
    (folder / "split_fault.py").write_text(FAULT)
    return folder


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.split", description=__doc__)
    parser.add_argument("pair", type=Path)
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=9)
    parser.add_argument("--chain", action="store_true", help="vLLM's own chain, without trees")
    parser.add_argument("--connector", default="NixlConnector")
    parser.add_argument("--back", action="store_true")
    parser.add_argument("--fault", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("/tmp/split"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
