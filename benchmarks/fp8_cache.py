"""Time tree attention over an FP8 cache, converted number by number and in packed registers.

    python -m benchmarks.fp8_cache --context 2048 32768 --batch 1 4 --rows 32 64

The layer is one of an 8B Llama. A line has microseconds of a call over the same keys in bfloat16
and in FP8 by both conversions (`spec_decode/kernels/attention/e4m3.py`), and how long a copy of the
FP8 keys takes. The exit status is 1 where both conversions did not give the same bits.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import cast
from unittest import mock

import torch

from benchmarks.attention import own_calls
from benchmarks.attention.problems import COLD_BYTES, problems
from benchmarks.attention.rows import CALLS, Timer, device_timer, in_turn
from benchmarks.attention.shapes import SHAPES, KvLayer
from vllm_graft.base import markdown
from vllm_graft.bench.common.step_bytes import copy_bandwidth
from vllm_graft.spec_decode.attention.choice import Point
from vllm_graft.spec_decode.kernels.attention import tree_attention
from vllm_graft.spec_decode.kernels.attention.e4m3 import PACKED, PLAIN
from vllm_graft.spec_decode.kernels.attention.workspace import AttentionWorkspace
from vllm_graft.spec_decode.trees.batch import TreeBatch

FORMS = {"plain": PLAIN, "packed": PACKED}


def in_fp8(batches: list[TreeBatch]) -> list[TreeBatch]:
    """The batches over an FP8 copy of their cache."""
    cache = batches[0].kv_cache.to(torch.float8_e4m3fn)
    return [replace(batch, kv_cache=cache) for batch in batches]


def measure(
    layer: KvLayer,
    point: Point,
    space: AttentionWorkspace,
    timer: Timer,
    device: str = "cuda",
    cold_bytes: int = COLD_BYTES,
) -> tuple[dict[str, float], bool]:
    """Microseconds by cache and conversion, and whether the conversions' outputs are the same."""
    wide = cast("list[TreeBatch]", problems(layer, point, CALLS, device, cold_bytes=cold_bytes))
    small = in_fp8(wide)
    times = {"bf16": timer(in_turn(own_calls.triton(wide, space, point.context)))}
    outputs = []
    for name, form in FORMS.items():
        with mock.patch.object(tree_attention, "conversion", return_value=form):
            calls = own_calls.triton(small, space, point.context)
            outputs.append(calls[0]().clone())
            times[name] = timer(in_turn(calls))
    return times, torch.equal(*outputs)


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context", nargs="+", type=int, default=[2048, 32768])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--rows", nargs="+", type=int, default=[32, 64])
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args(given)
    [layer] = SHAPES["llama-8b"]
    assert isinstance(layer, KvLayer)
    most = max(arguments.batch), max(arguments.rows)
    space = AttentionWorkspace.allocate(*most, layer.heads, layer.head_size, 64, "cuda")
    rate, timer = copy_bandwidth(torch.device("cuda")), device_timer(arguments.repeats)
    lines, alike = [], True
    for context in arguments.context:
        for batch in arguments.batch:
            for rows in arguments.rows:
                times, same = measure(layer, Point(batch, rows, context), space, timer)
                alike &= same
                copied = 1e6 * batch * context * layer.key_bytes / 2 / rate
                shown = [f"{times[name]:.1f}" for name in ("bf16", *FORMS)]
                lines.append([str(context), str(batch), str(rows), *shown, f"{copied:.1f}"])
                torch.cuda.empty_cache()
    print(markdown.table(["context", "batch", "rows", "bf16", *FORMS, "copy"], lines))
    print("the same bits" if alike else "the conversions differ")
    return 0 if alike else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
