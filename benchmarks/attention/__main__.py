"""Time tree attention against the platform's own kernels over the same paged keys, in CUDA graphs.

    python -m benchmarks.attention --shape all --json attention.json
    python -m benchmarks.attention --shape llama-8b --context 2048 8192 32768 --batch 1 4 16 32

A shape is the attention layers of a model, one of each kind: full attention, windows, sinks, or
latents (MLA). The platform's kernels have no tree mask: they compute a chain of as many rows (what
stock speculation verifies), and one row (a decode step, the least that any kernel reads). They are
called as vLLM's backends call them in FULL graphs; the first that runs in vLLM's own order is the
one that an engine has, and "to the fastest" compares with the best of all. A kernel that does not
run is listed with its error.

Where two of our kernels can compute a layer, "ours" is what an engine takes by its own measurement.
Each call of a graph reads other blocks than the calls before it, so that no keys are in the L2
cache. Graphs are captured for the longest of the contexts, as an engine of that `--max-model-len`
captures them; `--longest 0` captures each for its own context.

"MB" is what has to be moved: the keys that a request's rows see, once, and queries and outputs. "Of
a copy's rate" is the time in which a large copy moves as much, over ours. "Difference" is how far
our output is from the platform's where the tree is a chain, in standard deviations. The exit status
is 1 where that is more than rounding, and 2 where nothing was measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention import table
from benchmarks.attention.rows import Bench, Row, device_timer, has_two_passes
from benchmarks.attention.shapes import SHAPES, Layer
from benchmarks.step_bytes import copy_bandwidth
from vllm_graft.spec_decode.kernels.attention.attention_plan import AttentionWorkspace
from vllm_graft.spec_decode.targets.dense.two_pass import Costs, points
from vllm_graft.spec_decode.tuning.attention_timing import measure

MAX_REQS = 256
CONTEXTS = (2048, 8192, 32768)


def allocate(layer: Layer, rows: int) -> AttentionWorkspace:
    """The workspace that an engine of `MAX_REQS` requests would have."""
    return AttentionWorkspace.allocate(MAX_REQS, rows, layer.heads, layer.output_size, 64, "cuda")


def engine_costs(
    layer: Layer, rows: int, batch: int, context: int, space: AttentionWorkspace
) -> Costs:
    """What an engine measures when it starts; its seconds, with kernels compiled, are printed."""
    where = points({rows}, batch, context)
    measure(layer.geometry, where[:1], space, context, "cuda")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    costs = measure(layer.geometry, where, space, context, "cuda")
    took = time.perf_counter() - begin
    print(f"an engine's own measurement, {len(costs)} points, took {took:.2f} s:")
    for point, times in costs.items():
        print(f"  {point}: " + ", ".join(f"{kernel} {us:.1f} us" for kernel, us in times.items()))
    return costs


def measure_layer(shape: str, layer: Layer, options: argparse.Namespace, rate: float) -> list[Row]:
    """The lines of a layer; each is printed as soon as it is there."""
    space = allocate(layer, options.rows)
    contexts = options.context or [*([table.NEAR] if layer.window else []), *CONTEXTS]
    longest = max(contexts) if options.longest is None else options.longest
    costs = None
    if has_two_passes(layer):
        try:
            costs = engine_costs(layer, options.rows, max(options.batch), max(contexts), space)
        except RuntimeError as error:
            print(f"{shape}, {layer.name}: an engine takes the Triton kernel: {error}", flush=True)
    bench = Bench(options.rows, space, longest, rate, device_timer(options.repeats))
    rows = []
    for context in contexts:
        for batch in options.batch:
            row = bench.measure(shape, layer, batch, context, costs)
            print("  ".join(table.cells(row)), flush=True)
            rows.append(row)
            torch.cuda.empty_cache()
    return rows


def report(rows: list[Row], file: Path | None, **more: Any) -> int:
    """Print the tables, write the file, return the exit status."""
    print(table.table(rows))
    print("\n".join([*table.verdicts(rows), *table.failures(rows)]), flush=True)
    if file:
        file.write_text(json.dumps({**more, "rows": [row.plain() for row in rows]}, indent=1))
    different = [row for row in rows if row.differs]
    for row in different:
        print(f"{row.shape}, {row.layer}, {row.batch}x{row.context}: differs: {row.differences}")
    return 1 if different else 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", nargs="+", choices=[*SHAPES, "all"], default=["llama-8b"])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument(
        "--context",
        type=int,
        nargs="+",
        help=f"keys of a request; {' '.join(map(str, CONTEXTS))}, and {table.NEAR} of windows",
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--longest", type=int, help="most keys of a request in a graph")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="file that takes the rows, after each layer")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.attention needs a GPU: nothing was measured", file=sys.stderr)
        return 2
    began = time.perf_counter()
    rate = copy_bandwidth(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}: a large copy moves {rate / 1e9:.0f} GB/s", flush=True)
    print("  ".join(table.HEADS))
    rows: list[Row] = []
    names = list(SHAPES) if "all" in options.shape else options.shape
    for shape in names:
        for layer in SHAPES[shape]:
            rows += measure_layer(shape, layer, options, rate)
            if options.json:
                plain = [row.plain() for row in rows]
                options.json.write_text(json.dumps({"copy rate": rate, "rows": plain}, indent=1))
    status = report(rows, options.json, **{"copy rate": rate})
    print(f"all of it took {time.perf_counter() - began:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
