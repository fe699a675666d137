"""Microseconds that a memory of texts adds to a step, on the host and on the device.

    python -m benchmarks.memory_cost --requests 1 16 64 256 --bytes 64MiB 1GiB

`write` adds `--tokens` tokens of each request; `search` and `match` look for the end of each text,
here with 4 matches of texts of `--width` tokens. All are in the graph of growing, `match` without a
memory as well. Device times are of replays of a CUDA graph with `CALLS` calls, host times of as
many calls: `step` is that of a step with drafts, `rest` that of a step without, `begin` that of a
new request, and `tell` that of a step with new requests. Without a GPU only host times without a
launch are measured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from pydantic import ByteSize, TypeAdapter
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

from vllm_graft.spec_decode.config.tree_config import MemoryConfig, NgramConfig
from vllm_graft.spec_decode.kernels.ngram_match import match_ngrams
from vllm_graft.spec_decode.kernels.text_memory import search_memory, write_memory
from vllm_graft.spec_decode.lookup.ngrams import Ngrams
from vllm_graft.spec_decode.trees.text_state import Owner
from vllm_graft.spec_decode.tuning.attention_timing import graph_time

CALLS = 50


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_time(call: Callable[[], object]) -> float:
    """Microseconds of a call, until it returns."""
    synchronize()
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    took = time.perf_counter() - began
    synchronize()
    return took / CALLS * 1e6


def measure(requests: int, size: int, width: int, tokens: int) -> dict[str, float]:
    """Measure with so many requests and bytes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kept = MemoryConfig(bytes=ByteSize(size))
    ngrams = Ngrams(NgramConfig(), requests, width, 9, device, 4, 2048, kept, depth=31)
    state, memory = ngrams.state, ngrams.state.memory
    assert memory is not None
    slots = torch.arange(requests, device=device)
    batch: Any = SimpleNamespace(num_reqs=requests, idx_mapping=slots)

    def tell() -> None:
        memory.is_told = False
        memory.tell()

    for slot in range(requests):
        memory.begin(slot, Owner(1, 1 + slot % 8), 0)
    figures = {
        "requests": requests,
        "bytes": memory.num_bytes,
        "step_host": host_time(lambda: ngrams.remember(batch, drafts=True)),
        "begin_host": host_time(lambda: memory.begin(0, Owner(1, 1), 0)),
        "tell_host": host_time(tell),
    }
    if device.type == "cpu":
        return figures
    # As vLLM has the texts where it can: in host memory, which the device reads.
    texts = torch.randint(0, 9, (requests, width), dtype=torch.int32).pin_memory()
    source = get_accelerator_view_from_cpu_tensor(texts)
    lengths = torch.full((requests,), width // 2, dtype=torch.int32, device=device)
    states: Any = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=source), total_len=SimpleNamespace(gpu=lengths)
    )
    ngrams.attach(states)

    def write() -> None:
        rewind()
        write_memory(memory, source, lengths, slots, requests)

    def rewind() -> None:
        memory.writers[:, 1] -= tokens

    def search() -> None:
        search_memory(state, lengths, slots, requests)

    def match() -> None:
        match_ngrams(state, source, lengths, slots, requests)

    for _ in range(width // 64):  # Texts come to the memory, until it has all of them.
        write_memory(memory, source, lengths, slots, requests)
    match()
    search()
    return {
        **figures,
        "found": int((state.keys[:, -4:] > 0).sum()) / requests,
        "rest_host": host_time(lambda: ngrams.remember(batch, drafts=False)),
        "write_host": host_time(lambda: write_memory(memory, source, lengths, slots, requests)),
        "write_device": graph_time(write, CALLS) - graph_time(rewind, CALLS),
        "search_device": graph_time(search, CALLS),
        "match_device": graph_time(match, CALLS),
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
