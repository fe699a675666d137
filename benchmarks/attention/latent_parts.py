"""Time the parts of tree attention over latents, and the second pass with other sizes of a program.

    python -m benchmarks.attention.latent_parts --context 2048 8192

A layer attends by FlashAttention 3 over the prefix (the first pass) and by our kernel over the
trees' own latents, which completes the first one's output in place (the second). "Both" is what
``benchmarks.attention`` times as two passes, with the schedule of FlashAttention once per graph.
The kernel that computes alone is given an output of zeros, which two passes do without: "zeros" is
what that costs.

"MB" is what a part has to move, and "least us" the time of that at a copy's rate, after a launch of
2.5 us; FlashAttention's arithmetic, its splits and their combination are not counted. "L2 MB" is
what the second pass's programs load and store: each loads all latents of its tree, twice as
values. A line that begins with ``rows=`` is the second pass with these sizes in place of
`own_tile`'s. The exit status is 1 where its output differs from theirs by more than rounding, and 2
where nothing was measured.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention import own_calls
from benchmarks.attention.__main__ import allocate
from benchmarks.attention.platform_calls import yardsticks
from benchmarks.attention.problems import problems
from benchmarks.attention.rows import CALLS, TOLERANCE, Timer, device_timer, in_turn, one_line
from benchmarks.attention.shapes import ITEM, SHAPES, LatentLayer
from vllm_graft.base import markdown
from vllm_graft.bench.common.step_bytes import copy_bandwidth
from vllm_graft.spec_decode.kernels.attention.workspace import AttentionWorkspace
from vllm_graft.spec_decode.kernels.sizes import cdiv
from vllm_graft.spec_decode.targets.dense.choice import Point
from vllm_graft.spec_decode.targets.latent.latent_two_pass import LATENT_PASSES
from vllm_graft.spec_decode.targets.latent.own_latents import (
    OwnTile,
    attend_own_latents,
    own_tile,
)
from vllm_graft.spec_decode.trees.batch import LatentBatch

LAUNCH = 2.5
"""Microseconds of a launch in a graph."""

CANDIDATES = (
    OwnTile(16, 128, 4, 3),
    OwnTile(16, 256, 8, 2),
    OwnTile(32, 64, 4, 3),
    OwnTile(32, 128, 4, 3),
    OwnTile(32, 256, 8, 2),
    OwnTile(64, 64, 4, 3),
    OwnTile(64, 64, 8, 3),
    OwnTile(64, 128, 8, 2),
)
"""Sizes of a program that fit the registers of Hopper."""

HEADS = ("shape", "batch", "context", "part", "us", "least us", "MB", "L2 MB", "difference")


@dataclass(frozen=True)
class Part:
    """A line of the table.

    Attributes:
        shape: the model.
        batch: requests.
        context: keys of each, its tree's among them.
        part: what was timed.
        time: microseconds per call; NaN where it did not run.
        bytes: what has to be moved.
        loaded: bytes that the programs load and store; 0 if unknown.
        difference: largest difference from the output of `own_tile`, in standard deviations of an
            output.
        error: why it did not run.
    """

    shape: str
    batch: int
    context: int
    part: str
    time: float
    bytes: int
    loaded: int = 0
    difference: float = 0.0
    error: str = ""

    def cells(self, rate: float) -> list[str]:
        """The line at a copy's rate in bytes per second."""
        least = LAUNCH + self.bytes / rate * 1e6
        sizes = [f"{size / 1e6:.1f}" if size else "" for size in (self.bytes, self.loaded)]
        shown = f"{self.difference:.3f}" if self.part.startswith("rows=") else ""
        named = [self.shape, str(self.batch), str(self.context), self.part]
        return [*named, self.error or f"{self.time:.1f}", f"{least:.1f}", *sizes, shown]


def label(tile: OwnTile) -> str:
    """What a table calls sizes of a program."""
    return f"rows={tile.rows} chunk={tile.chunk} warps={tile.warps} stages={tile.stages}"


def part_bytes(layer: LatentLayer, point: Point) -> dict[str, int]:
    """Bytes that each part has to move."""
    pairs, width = point.num_reqs * point.rows * layer.heads, layer.rank + layer.rope
    queries, outputs = pairs * width * ITEM, pairs * layer.rank * ITEM
    own = point.num_reqs * point.rows * layer.key_bytes
    prefix = point.num_reqs * (point.context - point.rows) * layer.key_bytes
    sums = pairs * torch.float32.itemsize
    first = queries + prefix + outputs + sums
    second = queries + own + sums + 2 * outputs
    return {
        "zeros": outputs,
        "first pass": first,
        "second pass": second,
        "both": first + second,
        "platform": queries + prefix + own + outputs,
    }


def loaded_bytes(layer: LatentLayer, point: Point, tile: OwnTile) -> int:
    """Bytes that the programs of the second pass load and store, from wherever they lie."""
    programs = point.num_reqs * cdiv(point.rows * layer.heads, tile.rows)
    latents = point.rows * (2 * layer.rank + layer.rope) * ITEM
    found = part_bytes(layer, point)["second pass"]
    return found + programs * latents - point.num_reqs * point.rows * layer.key_bytes


def parts(
    shape: str,
    layer: LatentLayer,
    point: Point,
    space: AttentionWorkspace,
    timer: Timer,
    *,
    longest: int,
    candidates: Sequence[OwnTile] = CANDIDATES,
    device: torch.device | str = "cuda",
) -> list[Part]:
    """The lines of one size.

    Args:
        shape: name of the model.
        layer: its layer.
        point: requests, rows of each one's tree, and keys of each.
        space: the workspace of an engine.
        timer: times a call.
        longest: most keys of a request in a graph.
        candidates: sizes of the second pass's programs.
        device: where it runs.
    """
    plain: Any = problems(layer, point, CALLS, device)
    batches: list[LatentBatch] = [replace(batch, max_seq_len=longest) for batch in plain]
    first, processors = batches[0], space.multiprocessors
    plan = LATENT_PASSES.plan(first, multiprocessors=processors)
    kept, lse = LATENT_PASSES.prefix(first, multiprocessors=processors, plan=plan)
    # This one is completed again and again: the time does not depend on the numbers.
    out = kept.clone()
    sizes = part_bytes(layer, point)
    line = functools.partial(Part, shape, point.num_reqs, point.context)

    def prefix(batch: LatentBatch) -> object:
        return LATENT_PASSES.prefix(batch, multiprocessors=processors, plan=plan)

    def second(batch: LatentBatch, tile: OwnTile | None = None) -> torch.Tensor:
        attend_own_latents(batch, out, lse, out, tile=tile)
        return out

    def each(function: Callable[..., object], *given: Any) -> float:
        return timer(in_turn([functools.partial(function, batch, *given) for batch in batches]))

    lines = [
        line("zeros", timer(lambda: torch.zeros_like(first.query)), sizes["zeros"]),
        line("first pass", each(prefix), sizes["first pass"]),
    ]
    own = own_tile(point.num_reqs, point.rows * layer.heads, layer.rank)
    moved, loads = sizes["second pass"], functools.partial(loaded_bytes, layer, point)
    lines.append(line("second pass", each(second), moved, loads(own)))
    both = own_calls.two_pass(batches, space, longest)
    lines.append(line("both", timer(in_turn(both)), sizes["both"]))
    kernel = yardsticks(layer)[0]
    calls = kernel.make(batches, point.rows, longest)
    lines.append(line(f"platform: {kernel.name}", timer(in_turn(calls)), sizes["platform"]))

    wanted = completed(first, own, kept, lse)
    for tile in candidates:
        entry = functools.partial(line, label(tile), bytes=moved, loaded=loads(tile))
        try:
            found = completed(first, tile, kept, lse)
            difference = float((found - wanted).abs().max() / wanted.std())
            lines.append(entry(time=each(second, tile), difference=difference))
        except Exception as error:  # Sizes that don't fit this device are a line of the report.
            lines.append(entry(time=float("nan"), error=one_line(error)))
    return lines


def completed(
    batch: LatentBatch, tile: OwnTile, prefix: torch.Tensor, lse: torch.Tensor
) -> torch.Tensor:
    """What the second pass makes of a copy of the first one's output, f32."""
    out = prefix.clone()
    attend_own_latents(batch, out, lse, out, tile=tile)
    return out.float()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention.latent_parts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    latent = [name for name, layers in SHAPES.items() if isinstance(layers[0], LatentLayer)]
    parser.add_argument("--shape", nargs="+", choices=latent, default=latent)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, nargs="+", default=[2048])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--longest", type=int, default=32768, help="most keys of a request")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="file that takes the lines")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("this benchmark needs a GPU: nothing was measured", file=sys.stderr)
        return 2
    began, timer = time.perf_counter(), device_timer(options.repeats)
    rate = copy_bandwidth(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}: a large copy moves {rate / 1e9:.0f} GB/s", flush=True)
    lines: list[Part] = []
    for name in options.shape:
        layer: Any = SHAPES[name][0]
        space = allocate(layer, options.rows)
        for context in options.context:
            for batch in options.batch:
                point = Point(batch, options.rows, context)
                longest = max(options.longest, context)
                found = parts(name, layer, point, space, timer, longest=longest)
                print("\n".join("  ".join(each.cells(rate)) for each in found), flush=True)
                lines += found
                torch.cuda.empty_cache()
    print(markdown.table(HEADS, [each.cells(rate) for each in lines]))
    if options.json:
        plain = [asdict(each) for each in lines]
        options.json.write_text(json.dumps({"copy rate": rate, "parts": plain}, indent=1))
    print(f"all of it took {time.perf_counter() - began:.0f} s")
    return 1 if any(not each.difference <= TOLERANCE for each in lines) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
