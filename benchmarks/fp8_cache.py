"""Time tree attention over an FP8 cache, by what a kernel does with e4m3 numbers and by tiles.

    python -m benchmarks.fp8_cache
    python -m benchmarks.fp8_cache --arms today halves:64 halves:128 --rows 16 64 --context 32768

The layer is one of an 8B Llama. A line has microseconds of a call over the same keys in bfloat16
and of each arm over FP8 keys, and how long a copy of the FP8 keys takes. Arms are:

    today       the query in bfloat16, keys and values converted four at a time
    converted   the same, and the query converted to bfloat16 before, as a layer of an engine does
    halves      an e4m3 query; all is converted to fp16 by the hardware
    products    an e4m3 query, multiplied by e4m3 keys; values are converted to fp16

`halves` and `products` take the tiles of bfloat16, or with `:64` those of 64 rows, with `:128`
those of 128 rows where there are so many, with `:64x128` and `:128x128` the same of 128 keys in
place of 64 (`spec_decode/kernels/attention/e4m3.py`: `Native`). The exit status is 1 where a row of
an arm differs from today's by more than rounding does.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import cast
from unittest import mock

import torch

from benchmarks.attention import own_calls
from benchmarks.attention.problems import COLD_BYTES, problems
from benchmarks.attention.rows import CALLS, Timer, device_timer, in_turn
from benchmarks.attention.shapes import DTYPE, SHAPES, KvLayer
from vllm_graft.base import markdown
from vllm_graft.bench.common.step_bytes import copy_bandwidth
from vllm_graft.spec_decode.kernels.attention import e4m3
from vllm_graft.spec_decode.kernels.attention.e4m3 import HALVES, PRODUCTS, Native
from vllm_graft.spec_decode.kernels.attention.tree_attention import tree_attention
from vllm_graft.spec_decode.kernels.attention.workspace import AttentionWorkspace
from vllm_graft.spec_decode.targets.dense.choice import Point
from vllm_graft.spec_decode.targets.dense.plain_query import plain_query
from vllm_graft.spec_decode.trees.batch import TreeBatch

TODAY = ("today", "converted")
FORMS = {"halves": HALVES, "products": PRODUCTS}
TILES = ("", "64", "64x128", "128", "128x128")
ARMS = [*TODAY, *(f"{form}:{tile}".rstrip(":") for form in FORMS for tile in TILES)]

TOLERANCE = 0.01
"""Largest norm of the difference of two outputs over that of one: weights are rounded to bfloat16
in one of them (2 ** -9), and so are both outputs."""


def native_of(arm: str) -> Native | None:
    """How kernels take e4m3 queries in an arm; None in those of today."""
    if arm in TODAY:
        return None
    form, _, tile = arm.partition(":")
    rows, _, keys = tile.partition("x")
    return Native(FORMS[form], int(rows or 0), int(keys or 64))


def in_fp8(batches: list[TreeBatch]) -> list[TreeBatch]:
    """The batches with an e4m3 query over an FP8 copy of their cache."""
    cache = batches[0].kv_cache.to(torch.float8_e4m3fn)
    query = batches[0].query.to(torch.float8_e4m3fn)
    one = torch.ones((), device=cache.device)
    return [replace(batch, kv_cache=cache, query=query, q_scale=one) for batch in batches]


def calls_of(
    arm: str, batches: list[TreeBatch], space: AttentionWorkspace, longest: int
) -> own_calls.Calls:
    """The calls of an arm, over batches with e4m3 queries."""
    query, one = batches[0].query, batches[0].q_scale
    if arm == "today":
        batches = [replace(batch, query=query.to(DTYPE)) for batch in batches]
    if arm != "converted":
        return own_calls.triton(batches, space, longest)
    assert one is not None
    out = torch.empty(query.shape, dtype=DTYPE, device=query.device)

    def call(batch: TreeBatch) -> torch.Tensor:
        plain = plain_query(query, one, DTYPE)
        tree_attention(replace(batch, query=plain, max_seq_len=longest), out, workspace=space)
        return out

    return [functools.partial(call, batch) for batch in batches]


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest norm of a row's and head's difference over its norm."""
    error = (found.float() - expected.float()).norm(dim=-1)
    return float((error / expected.float().norm(dim=-1)).max())


def measure(
    layer: KvLayer,
    point: Point,
    space: AttentionWorkspace,
    timer: Timer,
    arms: Sequence[str],
    device: str = "cuda",
    cold_bytes: int = COLD_BYTES,
) -> tuple[dict[str, float], dict[str, float]]:
    """Microseconds by arm, bfloat16 first, and how far the arms' outputs are from today's."""
    wide = cast("list[TreeBatch]", problems(layer, point, CALLS, device, cold_bytes=cold_bytes))
    small = in_fp8(wide)
    times = {"bf16": timer(in_turn(own_calls.triton(wide, space, point.context)))}
    [expected, *_] = calls_of("today", small, space, point.context)
    today, differences = expected().clone(), {}
    for arm in arms:
        with mock.patch.object(e4m3, "NATIVE", native_of(arm)):
            calls = calls_of(arm, small, space, point.context)
            differences[arm] = difference(calls[0](), today)
            times[arm] = timer(in_turn(calls))
    return times, differences


def arguments_of(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, metavar="ARM")
    parser.add_argument("--context", nargs="+", type=int, default=[2048, 32768])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=20)
    return parser.parse_args(given)


def main(given: list[str]) -> int:
    arguments = arguments_of(given)
    [layer] = SHAPES["llama-8b"]
    assert isinstance(layer, KvLayer)
    most = max(arguments.batch), max(arguments.rows)
    space = AttentionWorkspace.allocate(*most, layer.heads, layer.head_size, 64, "cuda")
    rate, timer = copy_bandwidth(torch.device("cuda")), device_timer(arguments.repeats)
    lines, largest = [], dict.fromkeys(arguments.arms, 0.0)
    for context in arguments.context:
        for batch in arguments.batch:
            for rows in arguments.rows:
                point = Point(batch, rows, context)
                times, differences = measure(layer, point, space, timer, arguments.arms)
                copied = 1e6 * batch * context * layer.key_bytes / 2 / rate
                shown = [f"{value:.1f}" for value in (*times.values(), copied)]
                lines.append([str(context), str(batch), str(rows), *shown])
                for arm, value in differences.items():
                    # A NaN stays.
                    largest[arm] = value if not value <= largest[arm] else largest[arm]
                torch.cuda.empty_cache()
    print(markdown.table(["context", "batch", "rows", "bf16", *arguments.arms, "copy"], lines))
    print("largest differences from today:", {arm: f"{x:.2g}" for arm, x in largest.items()})
    return 0 if all(value <= TOLERANCE for value in largest.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
