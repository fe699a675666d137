"""Time tree attention against FlashAttention 3 over the same paged K/V, in CUDA graphs.

FlashAttention has no tree mask: it computes a chain of as many rows (what stock speculation
verifies), and one row (a decode step, the least that any kernel reads).

    python benchmarks/attention.py --rows 32 --context 2048 8192 32768 --batch 1 4 16 32
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vllm_graft.spec_decode.kernels.attention import AttentionWorkspace, tree_attention
from vllm_graft.spec_decode.kernels.problems import AttentionShape, tree_problem

CALLS = 10


def graph_time(call: Callable[[], object], repeats: int) -> float:
    """Median microseconds a call, of `CALLS` in one graph: launches by the host don't count."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return float(statistics.median(times))


def flash(problem: dict[str, Any], rows: int) -> Callable[[], object]:
    """FlashAttention 3 over the problem's cache, `rows` query rows a request, causal."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    cache = problem["kv_cache"].transpose(1, 2)
    head_size = cache.shape[-1] // 2
    key, value = cache.split(head_size, dim=-1)
    num_reqs = len(problem["seq_lens"])
    query = problem["query"]
    query = torch.randn(num_reqs * rows, *query.shape[1:], dtype=query.dtype, device="cuda")
    starts = torch.arange(0, num_reqs * rows + 1, rows, dtype=torch.int32, device="cuda")
    out = torch.empty_like(query)
    longest = int(problem["seq_lens"].max())
    return lambda: flash_attn_varlen_func(
        q=query,
        k=key,
        v=value,
        out=out,
        max_seqlen_q=rows,
        cu_seqlens_q=starts,
        max_seqlen_k=longest,
        seqused_k=problem["seq_lens"],
        block_table=problem["block_table"],
        softmax_scale=problem["scale"],
        causal=True,
        fa_version=3,
    )


def tree(problem: dict[str, Any], max_reqs: int) -> Callable[[], object]:
    """Our kernel, with the workspace that an engine of `max_reqs` requests would give it."""
    _, heads, size = problem["query"].shape
    space = AttentionWorkspace.allocate(max_reqs, problem["max_rows"], heads, size, 32, "cuda")
    out = torch.empty_like(problem["query"])
    longest = int(problem["seq_lens"].max())
    return lambda: tree_attention(**problem, out=out, workspace=space, max_seq_len=longest)


def measure(batch: int, context: int, rows: int, repeats: int) -> dict[str, float]:
    """One line of the table: Llama-3.1-8B's heads."""
    shape = AttentionShape(
        rows=(rows,) * batch,
        lens=(context,) * batch,
        kv_heads=8,
        group=4,
        head_size=128,
        dtype=torch.bfloat16,
        max_blocks=65536,
    )
    problem = tree_problem(shape, "cuda")
    row: dict[str, float] = {"batch": batch, "context": context}
    row["tree us"] = graph_time(tree(problem, 256), repeats)
    row["fa3 chain us"] = graph_time(flash(problem, rows), repeats)
    row["fa3 one row us"] = graph_time(flash(problem, 1), repeats)
    row["tree / fa3 chain"] = row["tree us"] / row["fa3 chain us"]
    row["tree / fa3 one row"] = row["tree us"] / row["fa3 one row us"]
    row["tree GB/s"] = batch * context * 8 * 2 * 128 * 2 / row["tree us"] / 1e3
    return {name: round(value, 3) for name, value in row.items()}


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
    rows = []
    for context in options.context:
        for batch in options.batch:
            rows.append(measure(batch, context, options.rows, options.repeats))
            if len(rows) == 1:
                print("  ".join(rows[0]))
            values = zip(rows[-1].values(), rows[0])
            print("  ".join(f"{value:g}".rjust(len(name)) for value, name in values), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
