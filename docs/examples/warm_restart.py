"""A server with a host KV cache that is restarted, and finds its K/V in a folder.

::

    python warm_restart.py Qwen/Qwen3-8B --store /var/cache/graft

The first server computes the K/V of a long prompt and keeps it. The second one starts when the
first has ended, as at an update, and reads the K/V instead of computing it. One process at a time
has the pages of a model open: give servers that run at once folders of their own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from vllm_graft.metrics.server_info import ask as info
from vllm_graft.testing.vllm_server import VllmServer

WRITTEN = "vllm:graft_hicache_written_pages_total"
READ = "vllm:graft_hicache_hit_tokens_storage_total"
PATIENCE = 60.0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()) / "graft-store")
    parser.add_argument("--host-bytes", default="4GiB", help="host memory of a server")
    parser.add_argument("--max-bytes", default="16GiB", help="of the folder")
    parser.add_argument("--cache", type=json.loads, default={}, help="more keys of the cache, JSON")
    parser.add_argument("--flags", type=json.loads, default=[], help="more flags, a JSON list")
    return parser.parse_args()


def with_cache(arguments: argparse.Namespace, name: str) -> VllmServer:
    """A server that has not been started yet."""
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
    flags = [arguments.model, "--served-model-name", "model", *arguments.flags]
    flags += ["--kv-transfer-config", json.dumps(transfer)]
    return VllmServer(flags, arguments.store / f"{name}.log")


def ask(server: VllmServer, prompt: str) -> dict[str, Any]:
    """Send a completion."""
    body = {"model": "model", "prompt": prompt, "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"{server.address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=300) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def total(server: VllmServer, name: str) -> float:
    """A counter of the server, as `vllm-graft info` reads it."""
    numbers = info(server.address).numbers
    return sum(value for key, value in numbers.items() if key.split("{")[0] == name)


def wait_until_stored(server: VllmServer) -> None:
    """Pages are written behind the requests, and counted in the engine's next step."""
    end = time.monotonic() + PATIENCE
    written = -1.0
    while written in (0, -1) or written != total(server, WRITTEN):
        if time.monotonic() > end:
            raise SystemExit(f"nothing was stored; see {server.log}")
        written = total(server, WRITTEN)
        time.sleep(1)
        ask(server, "Go on.")


def main() -> None:
    arguments = parse()
    arguments.store.mkdir(parents=True, exist_ok=True)
    prompt = "".join(f"{number} bottles of beer on the wall, " for number in range(20, 0, -1))
    with with_cache(arguments, "first") as first:
        first.wait_ready()
        answer = ask(first, prompt)
        wait_until_stored(first)
    with with_cache(arguments, "second") as second:
        second.wait_ready()
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
