"""A server with a host KV cache that is restarted, and finds its K/V in a folder.

::

    python warm_restart.py Qwen/Qwen3-8B --store /var/cache/graft

The first server computes the K/V of a long prompt and keeps it. The second one starts when the
first has ended, as at an update, and reads the K/V instead of computing it. One process at a time
has the pages of a model open: give servers that run at once folders of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_graft.metrics.server_info import ask as info

WRITTEN = "vllm:graft_hicache_written_pages_total"
READ = "vllm:graft_hicache_hit_tokens_storage_total"
PATIENCE = 60.0
# A proxy of the environment must not see the loopback interface.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()) / "graft-store")
    parser.add_argument("--host-bytes", default="4GiB", help="host memory of a server")
    parser.add_argument("--max-bytes", default="16GiB", help="of the folder")
    parser.add_argument("--cache", type=json.loads, default={}, help="more keys of the cache, JSON")
    parser.add_argument("--flags", type=json.loads, default=[], help="more flags, a JSON list")
    return parser.parse_args()


@contextlib.contextmanager
def serving(arguments: argparse.Namespace, name: str) -> Iterator[str]:
    """A server with the cache, ready to answer at the address that is yielded."""
    storage = {"backend": "segments", "path": str(arguments.store)}
    storage["max_bytes"] = arguments.max_bytes
    transfer = {
        "kv_connector": "HiCacheConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "host_bytes": arguments.host_bytes,
            "storage": storage,
            **arguments.cache,
        },
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", arguments.model]
    command += ["--served-model-name", "model", "--host", "127.0.0.1", "--port", port]
    command += [*arguments.flags, "--kv-transfer-config", json.dumps(transfer)]
    address, log = f"http://127.0.0.1:{port}", arguments.store / f"{name}.log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        while True:
            with contextlib.suppress(urllib.error.URLError):
                OPENER.open(f"{address}/health", timeout=10).close()
                break
            if server.poll() is not None:
                raise SystemExit(f"the server ended while starting; see {log}")
            time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        server.wait()


def ask(address: str, prompt: str) -> dict[str, Any]:
    """Send a completion."""
    body = {"model": "model", "prompt": prompt, "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with OPENER.open(request, timeout=300) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def total(address: str, name: str) -> float:
    """A counter of the server, as `vllm-graft info` reads it."""
    numbers = info(address).numbers
    return sum(value for key, value in numbers.items() if key.split("{")[0] == name)


def wait_until_stored(address: str) -> None:
    """Pages are written behind the requests, and counted in the engine's next step."""
    end = time.monotonic() + PATIENCE
    written = -1.0
    while written in (0, -1) or written != total(address, WRITTEN):
        if time.monotonic() > end:
            raise SystemExit("nothing was stored; see the logs beside the store")
        written = total(address, WRITTEN)
        time.sleep(1)
        ask(address, "Go on.")


def main() -> None:
    arguments = parse()
    arguments.store.mkdir(parents=True, exist_ok=True)
    prompt = "".join(f"{number} bottles of beer on the wall, " for number in range(20, 0, -1))
    with serving(arguments, "first") as first:
        answer = ask(first, prompt)
        wait_until_stored(first)
    with serving(arguments, "second") as second:
        again = ask(second, prompt)
        tokens = int(total(second, READ))
    told = {
        "prompt tokens": answer["usage"]["prompt_tokens"],
        "of which the second server read from the store": tokens,
        "same answer": answer["choices"][0]["text"] == again["choices"][0]["text"],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
