"""Host KV caches side by side: none, vLLM's own (`native`) and ours.

    vllm-graft bench hicache --model MODEL --arms none native ours

All arms are up at the same time, each in a process of its own with its share of the GPU's memory,
and take turns, `--rounds` times; the table has the medians. Parts are

- `first_token`, time to the first token of a prompt whose long prefix (`--prefix`, several lengths
  if you like) only the host still has, with a new suffix;
- `decode`, tokens per second while K/V is written back;
- `load`, concurrent sessions of several turns with more K/V than the device holds.

JSON behind an arm's name goes into its connector's extra configuration:
`ours:{"load": "async"}`. Texts are random token ids, so with
`--options '{"load_format": "dummy"}'` MODEL needs no weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from vllm_graft.bench.common import arm_processes, report
from vllm_graft.bench.common.arm import Arm, Row, median_row, panels, table, write_files
from vllm_graft.bench.hicache.cache_parts import Figures, Parts, Sizes, add_sizes, read_sizes

SUMMARY = "a host KV cache beside vLLM's own and none: first tokens, decoding, load"
PARTS = {
    "first_token": "first token of a host hit, ms",
    "decode": "decoding, tokens per second",
    "load": "load, turns per second",
}
TAIL = "load, p99 of first tokens, ms"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own arguments; ``--output`` and ``--plot`` are there already."""
    parser.add_argument("--model", required=True, help="checkpoint folder, or a name")
    parser.add_argument("--arms", nargs="+", default=["none", "native", "ours"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--prefix", nargs="+", type=int, default=[8192], help="known tokens")
    parser.add_argument("--max-model-len", type=int, default=10_240)
    add_sizes(parser)
    arm_processes.add_engine_arguments(parser)


def read_arm(name: str, sizes: Sizes) -> Arm:
    """Make the arm of a name."""
    kind, _, given = name.partition(":")
    size = int(sizes.host_gib * 2**30)
    try:
        extra = dict(json.loads(given or "{}"))
    except ValueError as wrong:
        raise report.BenchmarkError(
            f"--arms {name!r}: no JSON behind the colon ({wrong})"
        ) from None
    if kind == "none":
        return Arm(name)
    if kind == "native":
        return Arm(name, _connector("OffloadingConnector", {**_native(size), **extra}))
    if kind == "ours":
        return Arm(name, _connector("HiCacheConnector", {"host_bytes": size, **extra}))
    raise report.BenchmarkError(
        f"--arms {name!r}: say none, native or ours, or one of them with :JSON behind it"
    )


def _connector(name: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_transfer_config": {
            "kv_connector": name,
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
            "kv_load_failure_policy": "recompute",
        }
    }


def _native(size: int) -> dict[str, Any]:
    """The configuration of vLLM's own connector, which keeps K/V in ``/dev/shm`` where it fits."""
    extra: dict[str, Any] = {"cpu_bytes_to_use": size}
    if shutil.disk_usage("/dev/shm").free < size:
        print("native: /dev/shm is too small, its host memory is private", flush=True)
        extra["spec_name"] = "PrivateMemorySpec"
        extra["spec_module_path"] = "vllm_graft.bench.hicache.native_arm"
    return extra


def engine_options(arm: Arm, sizes: Sizes, arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of ``vllm.LLM`` for an arm; all arms hold as much K/V on the device."""
    return {
        "block_size": sizes.block,
        "enable_prefix_caching": True,
        "max_model_len": arguments.max_model_len,
        "max_num_seqs": max(sizes.requests, sizes.sessions),
        # Block 0 is never used.
        "num_gpu_blocks_override": sizes.gpu_tokens // sizes.block + 1,
        **arm_processes.with_options(arm.options, arguments.options),
    }


def take_turns(
    pipes: Mapping[Arm, Connection], part: str, size: int, rounds: int
) -> dict[str, list[Figures]]:
    """Ask all arms for one part in turn; a first round only warms up."""
    found: dict[str, list[Figures]] = {arm.name: [] for arm in pipes}
    for number in range(rounds + 1):
        arms = list(pipes.items())
        for arm, pipe in reversed(arms) if number % 2 else arms:
            pipe.send((part, number, size))
            figures: Figures = arm_processes.answer(arm, pipe)
            if number:
                found[arm.name].append(figures)
                print(json.dumps({"arm": arm.name, "part": part, **figures}), flush=True)
    return found


def rows_of(part: str, size: int, found: Mapping[str, list[Figures]]) -> list[Row]:
    """A row for each arm; `load` has a second one for its first tokens."""
    rows = [
        median_row(arm, {"part": PARTS[part], "size": size}, rounds)
        for arm, rounds in found.items()
    ]
    if part == "load":
        name = "first_token_p99_ms"
        rows += [
            median_row(arm, {"part": TAIL, "size": size}, [{name: each[name]} for each in rounds])
            for arm, rounds in found.items()
        ]
    return rows


def compare(arguments: argparse.Namespace) -> list[Row]:
    """Start all arms, let them take turns, and return a row for each arm and part."""
    sizes = read_sizes(arguments)
    arms = [read_arm(name, sizes) for name in arguments.arms]
    options = {arm: engine_options(arm, sizes, arguments) for arm in arms}
    pipes = arm_processes.start(
        options, arguments.model, partial(Parts, sizes=sizes), arguments.kv_cache_bytes
    )
    asked = {"first_token": arguments.prefix, "decode": [sizes.requests], "load": [sizes.sessions]}
    rows: list[Row] = []
    for part in arguments.parts:
        for size in asked[part]:
            rows += rows_of(part, size, take_turns(pipes, part, size, arguments.rounds))
            if arguments.output:
                report.write_json(arguments.output, [row.flat() for row in rows], quiet=True)
    arm_processes.stop(pipes)
    return rows


def cell(row: Row) -> str:
    """The figure that arms are compared by, and the share of hits or the cached tokens."""
    figures = row.figures
    if "cached" in figures:
        return f"{row.main[1]:.1f} ({figures['cached']:.0f} cached)"
    if "hit_rate" in figures:
        return f"{row.main[1]:.2f} ({figures['hit_rate']:.0%} hits)"
    return f"{row.main[1]:.0f}"


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, write the files; status 1 if a request failed."""
    rows = compare(arguments)
    print(table(rows, cell), flush=True)
    first = [row for row in rows if "cached" in row.figures]
    drawn = panels(first, "size", {"first_token_ms": "ms to the first token"})
    write_files(arguments, rows, drawn)
    return 1 if any(row.figures.get("errors") for row in rows) else 0
