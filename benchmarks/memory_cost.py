"""Microseconds that a memory of texts adds to a step, on the host and on the device.

    python -m benchmarks.memory_cost --requests 1 16 64 256 --bytes 64MiB 1GiB

`write` is what every step launches: each request adds `--tokens` tokens. `search` and `match` are
in the graph of growing, here with 4 matches of texts of `--width` tokens; `match` is there without
a memory as well. Device times are of replays of a CUDA graph with `CALLS` calls, host times of as
many launches. `begin` is the host's for a new request.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence

import torch
from pydantic import ByteSize, TypeAdapter
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

from vllm_graft.spec_decode.kernels.ngram_match import match_ngrams
from vllm_graft.spec_decode.kernels.text_memory import search_memory, write_memory
from vllm_graft.spec_decode.trees.memory_state import MemoryState
from vllm_graft.spec_decode.trees.ngram_state import NgramState
from vllm_graft.spec_decode.trees.reference import Owner
from vllm_graft.spec_decode.tuning.attention_timing import graph_time

CALLS = 50


def host_time(call: Callable[[], object]) -> float:
    """Microseconds of a call, until it returns."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    took = time.perf_counter() - began
    torch.cuda.synchronize()
    return took / CALLS * 1e6


def measure(requests: int, size: int, width: int, tokens: int) -> dict[str, float]:
    """Measure with so many requests and bytes."""
    device = torch.device("cuda")
    memory = MemoryState.allocate(size, requests, device)
    state = NgramState.allocate(3, 16, requests, width, device, 4, 2048, memory)
    # As vLLM has the texts where it can: in host memory, which the device reads.
    texts = torch.randint(0, 9, (requests, width), dtype=torch.int32).pin_memory()
    source = get_accelerator_view_from_cpu_tensor(texts)
    slots = torch.arange(requests, device=device)
    lengths = torch.full((requests,), width // 2, dtype=torch.int32, device=device)
    for slot in range(requests):
        memory.begin(slot, Owner(1, 1 + slot % 8), 0)
    for _ in range(width // 64):  # Texts come to the memory, until it has all of them.
        write_memory(memory, source, lengths, slots, requests)

    def write() -> None:
        memory.writers[:, 3] -= tokens
        write_memory(memory, source, lengths, slots, requests)

    def rewind() -> None:
        memory.writers[:, 3] -= tokens

    def search() -> None:
        search_memory(state, lengths, slots, requests)

    def match() -> None:
        match_ngrams(state, source, lengths, slots, requests)

    match()
    search()
    found = int((state.keys[:, -4:] > 0).sum())
    return {
        "requests": requests,
        "bytes": memory.num_bytes,
        "found": found / requests,
        "write_host": host_time(lambda: write_memory(memory, source, lengths, slots, requests)),
        "write_device": graph_time(write, CALLS) - graph_time(rewind, CALLS),
        "search_device": graph_time(search, CALLS),
        "match_device": graph_time(match, CALLS),
        "begin_host": host_time(lambda: memory.begin(0, Owner(1, 1), 0)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--bytes", nargs="+", default=["64MiB"])
    parser.add_argument("--width", type=int, default=8192, help="tokens of a text at most")
    parser.add_argument("--tokens", type=int, default=4, help="that a request adds in a step")
    arguments = parser.parse_args(argv)
    sizes = [TypeAdapter(ByteSize).validate_python(size) for size in arguments.bytes]
    for size in sizes:
        for requests in arguments.requests:
            figures = measure(requests, size, arguments.width, arguments.tokens)
            print(json.dumps({key: round(value, 2) for key, value in figures.items()}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
