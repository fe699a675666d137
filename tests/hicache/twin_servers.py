"""Compare two ``vllm serve`` of one ``engine_id``, run at once, with one without our parts.

    python -m tests.hicache.twin_servers --requests 300

Both keep K/V in host memory that their scheduler and their rank share. Requests go to both at once,
in another order to each, so that a slot of one would hold what a slot of the other does not. The
exit status is 1 if an answer differs, if both map one file, or if a file is left in ``/dev/shm``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from vllm_graft.testing.vllm_server import VllmServer

TOKENS = 6
TIE = 1e-4
"""Rounding, which differs with the batch, decides between tokens of a smaller gap in logprobs."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_GRAFT_INTERPRET": "1",
    "VLLM_GRAFT_PREFILL_RATE": "10",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}


def prompts(count: int, seed: int = 11) -> list[list[int]]:
    numbers = random.Random(seed)
    stems = [[numbers.randrange(5, 500) for _ in range(200)] for _ in range(max(1, count // 6))]
    return [
        numbers.choice(stems)[: numbers.randrange(64, 200)]
        + [numbers.randrange(5, 500) for _ in range(numbers.randrange(1, 40))]
        for _ in range(count)
    ]


def flags(model: Path, storage: Path | None = None, **transfer: Any) -> list[str]:
    """Return flags of a server with 23 device blocks; ``storage`` adds 64 pages of host memory."""
    found = [str(model), "--served-model-name", "tiny", "--max-model-len", "512"]
    found += ["--max-num-seqs", "4", "--dtype", "float32", "--enforce-eager"]
    found += ["--block-size", "32", "--num-gpu-blocks-override", "24"]
    if storage is None:
        return [*found, "--no-enable-prefix-caching"]
    config = {
        "kv_connector": "HiCacheConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "host_bytes": "2MiB",
            "load": "async",
            "storage": {"backend": "segments", "path": str(storage), "max_bytes": "16MiB"},
        },
        **transfer,
    }
    return [*found, "--enable-prefix-caching", "--kv-transfer-config", json.dumps(config)]


class Answer(NamedTuple):
    """Greedy tokens, and for each the logprob minus that of the second best."""

    tokens: list[int]
    gaps: list[float]

    def tie(self, other: Answer) -> float | None:
        """The gap at the first token that differs, which rounding may decide; None if none does."""
        found = zip(self.tokens, other.tokens, self.gaps)
        if len(self.tokens) != len(other.tokens):
            return math.inf
        return next((gap for one, two, gap in found if one != two), None)


def answer(address: str, prompt: Sequence[int]) -> Answer:
    body = {"model": "tiny", "prompt": list(prompt), "max_tokens": TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, "logprobs": 2}
    body |= {"return_tokens_as_token_ids": True}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=120) as reply:
        choice = json.load(reply)["choices"][0]
    best = [sorted(top.values())[-2:] for top in choice["logprobs"]["top_logprobs"]]
    return Answer(choice["token_ids"], [two[-1] - two[0] for two in best])


def ask(address: str, asked: Sequence[Sequence[int]], seed: int) -> list[Answer]:
    """Send all prompts, four at a time, in an order of this seed, and return the answers."""
    order = random.Random(seed).sample(range(len(asked)), len(asked))
    with ThreadPoolExecutor(4) as threads:
        found = dict(zip(order, threads.map(lambda n: answer(address, asked[n]), order)))
    return [found[number] for number in range(len(asked))]


@contextmanager
def meeting(twins: Sequence[VllmServer]) -> Iterator[None]:
    """Hold the server that maps a region first until the other has mapped one as well.

    At that moment they could take each other's region. It lasts a second on a CPU, and as long as
    the capture of graphs on a GPU.
    """
    while not (first := next((server for server in twins if mapped(server)), None)):
        time.sleep(0.002)
    signal_all(first, signal.SIGSTOP)
    try:
        end = time.monotonic() + 120
        while not all(map(mapped, twins)) and time.monotonic() < end:
            time.sleep(0.002)
    finally:
        signal_all(first, signal.SIGCONT)
    yield


def signal_all(server: VllmServer, number: int) -> None:
    assert server._process is not None
    os.killpg(server._process.pid, number)


def mapped(server: VllmServer) -> set[str]:
    """Return inodes of our files below ``/dev/shm`` that processes of the server map."""
    found = set()
    assert server._process is not None
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if os.getsid(int(folder.name)) != server._process.pid:
                    continue
                lines = (folder / "maps").read_text().splitlines()
            except OSError:
                continue
            found |= {line.split()[4] for line in lines if "/dev/shm/vllm_graft" in line}
    return found


def twin_run(model: Path, folder: Path, asked: Sequence[Sequence[int]]) -> dict[str, float]:
    """Compare the answers of two servers with one engine_id with those of one without our parts."""
    with VllmServer(flags(model), folder / "plain.log", ENVIRONMENT) as server:
        server.wait_ready(every=30)
        expected = ask(server.address, asked, seed=0)
    with ExitStack() as stack:
        twins = [
            stack.enter_context(
                VllmServer(
                    flags(model, folder / f"kv{number}", engine_id="dup"),
                    folder / f"twin{number}.log",
                    ENVIRONMENT,
                )
            )
            for number in range(2)
        ]
        stack.enter_context(meeting(twins))
        for server in twins:
            server.wait_ready(every=30)
        regions = [mapped(server) for server in twins]
        with ThreadPoolExecutor(2) as threads:
            rounds = list(threads.map(lambda n: ask(twins[n].address, asked, n + 1), range(2)))
            rounds += list(threads.map(lambda n: ask(twins[n].address, asked, n + 3), range(2)))
    pairs = [pair for found in rounds for pair in zip(expected, found)]
    gaps = [gap for one, two in pairs if (gap := one.tie(two)) is not None]
    ties = [gap for gap in gaps if gap <= TIE]
    return {
        "answers": len(pairs),
        "different": len(gaps) - len(ties),
        "ties": len(ties),
        "widest_tie": max(ties, default=0),
        "regions": len(regions[0] | regions[1]),
        "shared_regions": len(regions[0] & regions[1]),
        "left_behind": sum("vllm_graft" in path.name for path in Path("/dev/shm").iterdir()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    arguments = parser.parse_args()
    from vllm_graft.testing import write_llama

    with tempfile.TemporaryDirectory() as scratch:
        model = write_llama(Path(scratch) / "llama")
        counts = twin_run(model, Path(scratch), prompts(arguments.requests))
    print(json.dumps(counts), flush=True)
    return 1 if counts["different"] or counts["shared_regions"] or counts["left_behind"] else 0


if __name__ == "__main__":
    sys.exit(main())
