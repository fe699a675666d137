"""Time both kernels of tree attention against FlashAttention 3 over the same paged K/V, in graphs.

FlashAttention has no tree mask: it computes a chain of as many rows (what stock speculation
verifies), and one row (a decode step, the least that any kernel reads). "tree" is our Triton
kernel, "two-pass" FlashAttention 3 over the prefix and then the tree's own rows, with one plan for
all calls of a graph as for all layers of a model, "unplanned" the same with one plan per call (as
for the chain). "chosen" is what an engine would take by its own measurement.

    python -m benchmarks.attention --rows 32 --context 2048 8192 32768 --batch 1 4 16 32
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vllm_graft.spec_decode.attention.attention_timing import (
    Geometry,
    flash_call,
    graph_time,
    measure,
    triton_call,
)
from vllm_graft.spec_decode.attention.choice import Costs, Point, Size, choose, points
from vllm_graft.spec_decode.attention.two_pass import two_pass_attention
from vllm_graft.spec_decode.kernels.attention.workspace import AttentionWorkspace
from vllm_graft.spec_decode.trees.batch import TreeBatch

CALLS = 10
MAX_REQS = 256
# A million tokens of K/V; a batch that needs more shares blocks among its requests.
CACHE_BYTES = 4 << 30
LLAMA_8B = Geometry(
    num_heads=32, kv_heads=8, head_size=128, dtype=torch.bfloat16, fp8=False, block_size=16
)


def flash(batch: TreeBatch, rows: int) -> Callable[[], object]:
    """FlashAttention 3 over the batch's cache, `rows` query rows per request, causal."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    key, value = batch.kv_cache.transpose(1, 2).chunk(2, dim=-1)
    num_reqs, query = batch.num_reqs, batch.query
    query = torch.randn(num_reqs * rows, *query.shape[1:], dtype=query.dtype, device="cuda")
    starts = torch.arange(0, num_reqs * rows + 1, rows, dtype=torch.int32, device="cuda")
    out = torch.empty_like(query)
    longest = int(batch.seq_lens.max())
    return lambda: flash_attn_varlen_func(
        q=query,
        k=key,
        v=value,
        out=out,
        max_seqlen_q=rows,
        cu_seqlens_q=starts,
        max_seqlen_k=longest,
        seqused_k=batch.seq_lens,
        block_table=batch.block_table,
        softmax_scale=batch.scale,
        causal=True,
        fa_version=3,
    )


def unplanned(batch: TreeBatch, multiprocessors: int, longest: int) -> Callable[[], None]:
    """Run both passes; FlashAttention makes its own plan in each call."""
    return functools.partial(
        two_pass_attention,
        replace(batch, max_seq_len=longest),
        torch.empty_like(batch.query),
        multiprocessors=multiprocessors,
    )


def allocate(rows: int) -> AttentionWorkspace:
    """The workspace that an engine of `MAX_REQS` requests would have."""
    heads, size = LLAMA_8B.num_heads, LLAMA_8B.head_size
    return AttentionWorkspace.allocate(MAX_REQS, rows, heads, size, 64, "cuda")


def row_of(point: Point, costs: Costs, space: AttentionWorkspace, repeats: int) -> dict[str, Any]:
    """Lay out one line of the table."""
    torch.cuda.empty_cache()
    trees = LLAMA_8B.problem(point, "cuda", cache_bytes=CACHE_BYTES)
    batch, rows, context = point
    timed = functools.partial(graph_time, calls=CALLS, repeats=repeats)
    kernel = choose(costs, Size(batch, rows))
    row: dict[str, Any] = {"batch": batch, "context": context}
    row["tree us"] = timed(triton_call(trees, space, context))
    row["two-pass us"] = timed(flash_call(trees, space.multiprocessors, context))
    row["unplanned us"] = timed(unplanned(trees, space.multiprocessors, context))
    row["fa3 chain us"] = timed(flash(trees, rows))
    row["fa3 one row us"] = timed(flash(trees, 1))
    row["tree / fa3 chain"] = row["tree us"] / row["fa3 chain us"]
    row["two-pass / fa3 chain"] = row["two-pass us"] / row["fa3 chain us"]
    row["chosen us"] = row["tree us" if kernel == "triton" else "two-pass us"]
    row["chosen / fa3 chain"] = row["chosen us"] / row["fa3 chain us"]
    row["chosen GB/s"] = batch * context * 8 * 2 * 128 * 2 / row["chosen us"] / 1e3
    return {name: round(value, 3) for name, value in row.items()} | {"chosen": kernel}


def engine_costs(
    rows: int, batch: int, context: int, space: AttentionWorkspace
) -> tuple[Costs, float]:
    """Return what an engine measures when it starts, and its seconds, with kernels compiled."""
    where = points({rows}, batch, context)
    measure(LLAMA_8B, where[:1], space, context, "cuda")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    costs = measure(LLAMA_8B, where, space, context, "cuda")
    return costs, time.perf_counter() - begin


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="file that takes the rows")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks/attention.py needs a GPU: nothing was measured", file=sys.stderr)
        return 2
    space = allocate(options.rows)
    costs, seconds = engine_costs(options.rows, max(options.batch), max(options.context), space)
    print(f"an engine's own measurement, {len(costs)} points, took {seconds:.2f} s:")
    for point, times in costs.items():
        print(f"  {point}: " + ", ".join(f"{kernel} {us:.1f} us" for kernel, us in times.items()))
    rows = []
    for context in options.context:
        for batch in options.batch:
            point = Point(batch, options.rows, context)
            rows.append(row_of(point, costs, space, options.repeats))
            if len(rows) == 1:
                print("  ".join(rows[0]))
            values = (f"{v:g}" if isinstance(v, (int, float)) else v for v in rows[-1].values())
            print("  ".join(v.rjust(len(name)) for v, name in zip(values, rows[0])), flush=True)
    worst = max(rows, key=lambda row: row["chosen / fa3 chain"])
    print(f"worst of the chosen kernels: {worst['chosen / fa3 chain']:.2f} x FlashAttention 3")
    if options.json:
        table = [{**point._asdict(), **times} for point, times in costs.items()]
        result = {"rows": rows, "engine": {"seconds": seconds, "table": table}}
        options.json.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
