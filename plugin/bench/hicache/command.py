"""Host KV caches side by side: none, vLLM's own (`native`), `lmcache` if it is there, and ours.

    vllm-graft bench hicache MODEL --dataset conversations.json --seconds 900

Each part is measured `--rounds` times; the table has the medians. Parts are

- `first_token`, time to the first token of a prompt whose long prefix (`--prefix`, several lengths
  if you like) only the host still has, with a new suffix;
- `decode`, tokens per second while K/V is written back;
- `load`, sessions of several turns with more K/V than the device holds: all at once, or with
  `--load open` at random times, with histories that the host does not hold either if you like.

So that the device holds little, all arms have `--gpu-tokens` of K/V there; the printed command
leaves that to vLLM. JSON behind an arm's name goes into its connector's extra configuration:
`ours:{"load": "async"}`. Texts are random token ids, so with `--load-format dummy` MODEL needs no
weights; with `--dataset`, a JSON file of conversations as ShareGPT's, its users talk in `load`.
"""

import argparse
import importlib.util
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm_graft.bench.common import arm_processes, report
from vllm_graft.bench.common.arm import Arm, Row, advice, median_row, panels, table, write_files
from vllm_graft.bench.common.report import BenchmarkError, TimeLimit, add_seconds
from vllm_graft.bench.common.serve_flags import Serving, adding, bare, groups
from vllm_graft.bench.hicache.cache_parts import (
    Figures,
    Parts,
    Sizes,
    add_sizes,
    read_sizes,
    read_talks,
)

SUMMARY = "a host KV cache beside vLLM's own and none: first tokens, decoding, load"
PARTS = {
    "first_token": "first token of a host hit, ms",
    "decode": "decoding, tokens per second",
    "load": "load, turns per second",
    "open_load": "open load, median of first tokens, ms",
}
TAIL = "p99 of first tokens, ms"

TRANSFER = "--kv-transfer-config"
_CONNECTOR = (TRANSFER, "--kv-offloading-size", "--kv-offloading-backend")
"""Flags that name a connector."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this benchmark; those of `vllm serve` are read apart."""
    parser.add_argument("--arms", nargs="+", default=["none", "native", "ours"])
    parts = ["first_token", "decode", "load"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    told = "each session sends its next turn behind its answer, or turns come at random times"
    parser.add_argument("--load", choices=["closed", "open"], default="closed", help=told)
    parser.add_argument("--prefix", nargs="+", type=int, default=[8192], help="known tokens")
    told = "JSON file of conversations; of each user's turn, --turn-tokens at most"
    parser.add_argument("--dataset", type=Path, metavar="FILE", help=told)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each arm")
    add_sizes(parser)
    add_seconds(parser)


def read_arm(name: str, sizes: Sizes, given: Serving) -> Arm:
    """Make the arm of a name; all arms hold as much K/V on the device. Raises `BenchmarkError` if
    the name can't be read, or vLLM or our part refuses it."""
    kind, _, text = name.partition(":")
    size, told = int(sizes.host_gib * 2**30), f"--arms {name!r}"
    try:
        extra = dict(json.loads(text or "{}"))
    except ValueError as wrong:
        raise BenchmarkError(f"{told}: no JSON behind the colon ({wrong})") from None
    flags = bare(given, *_CONNECTOR)
    if kind == "native":
        flags = adding(flags, TRANSFER, _connector("OffloadingConnector", _native(size) | extra))
    elif kind == "ours":
        extra = {"host_bytes": size, **_own_keys(given), **extra}
        flags = adding(flags, TRANSFER, _connector("HiCacheConnector", extra))
    elif kind == "lmcache":
        if importlib.util.find_spec("lmcache") is None:
            raise BenchmarkError(f"{told}: LMCache is not there, pip install lmcache")
        own = {"lmcache.local_cpu": True, "lmcache.max_local_cpu_size": sizes.host_gib}
        flags = adding(flags, TRANSFER, _connector("LMCacheConnectorV1", own | extra))
    elif kind != "none":
        raise BenchmarkError(
            f"{told}: say none, native, lmcache or ours, or one of them with :JSON behind it"
        )
    served = Serving.read(flags, told)
    arm, block = served.arm(name), sizes.block or served.config.cache_config.block_size
    return replace(arm, options=held_alike(arm.options, replace(sizes, block=block)))


def held_alike(options: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Options with as much K/V on the device as `Sizes` say."""
    return {
        "enable_prefix_caching": True,
        "max_num_seqs": max(sizes.requests, sizes.sessions),
        **options,
        "block_size": sizes.block,
        # Block 0 is never used.
        "num_gpu_blocks_override": sizes.gpu_tokens // sizes.block + 1,
        # VLLM starts no engine whose K/V cache is too small for one request.
        "max_model_len": min(options["max_model_len"], sizes.gpu_tokens),
    }


def _own_keys(given: Serving) -> dict[str, Any]:
    found = given.request.engine.kv_transfer_config
    if found is None or found.kv_connector != "HiCacheConnector":
        return {}
    return dict(found.kv_connector_extra_config)


def _connector(name: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
        "kv_load_failure_policy": "recompute",
    }


def _native(size: int) -> dict[str, Any]:
    """The configuration of vLLM's own connector, which keeps K/V in ``/dev/shm`` where it fits."""
    extra: dict[str, Any] = {"cpu_bytes_to_use": size}
    if shutil.disk_usage("/dev/shm").free < size:
        print("native: /dev/shm is too small, its host memory is private", flush=True)
        extra["spec_name"] = "PrivateMemorySpec"
        extra["spec_module_path"] = "vllm_graft.bench.hicache.native_arm"
    return extra


def take_turns(
    pipes: Mapping[Arm, Connection], part: str, size: int, rounds: Iterable[int]
) -> dict[str, list[Figures]]:
    """Ask all arms for one part in turn; round 0 only warms up."""
    found: dict[str, list[Figures]] = {arm.name: [] for arm in pipes}
    for number in rounds:
        arms = list(pipes.items())
        for arm, pipe in reversed(arms) if number % 2 else arms:
            pipe.send((part, number, size))
            figures: Figures = arm_processes.answer(arm, pipe)
            if number:
                found[arm.name].append(figures)
                print(json.dumps({"arm": arm.name, "part": part, **figures}), flush=True)
    return found


def rows_of(part: str, size: int, found: Mapping[str, list[Figures]]) -> list[Row]:
    """A row for each arm; loads have a second one for the last of their first tokens."""
    rows = [
        median_row(arm, {"part": PARTS[part], "size": size}, rounds)
        for arm, rounds in found.items()
    ]
    name = "first_token_p99_ms"
    if all(name in each for rounds in found.values() for each in rounds):
        tail = f"{PARTS[part].partition(',')[0]}, {TAIL}"
        rows += [
            median_row(arm, {"part": tail, "size": size}, [{name: each[name]} for each in rounds])
            for arm, rounds in found.items()
        ]
    return rows


def compare(
    arms: Sequence[Arm], given: Serving, sizes: Sizes, arguments: argparse.Namespace
) -> list[Row]:
    """Start the arms, let them take turns, and return a row for each arm and part."""
    told = partial(Parts, sizes=sizes, talks=read_talks(arguments.dataset, given, sizes))
    asked = {"first_token": arguments.prefix, "decode": [sizes.requests], "load": [sizes.sessions]}
    opens = {"load": "open_load"} if arguments.load == "open" else {}
    cases = [(opens.get(part, part), size) for part in arguments.parts for size in asked[part]]
    parted = groups(arms, sizes.gpu_tokens)
    limit = TimeLimit(arguments.seconds, len(parted))
    rows: list[Row] = []
    for group in parted:
        pipes = arm_processes.start(group, given.model, told)
        for part, size in limit.within(cases):
            rounds = limit.rounds(arguments.rounds + 1, least=2)
            rows += rows_of(part, size, take_turns(pipes, part, size, rounds))
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


def run(arguments: argparse.Namespace, flags: list[str]) -> int:
    """Measure, print the table, write the files; status 1 if a request failed."""
    from vllm.platforms import current_platform

    sizes, given = read_sizes(arguments), Serving.read(flags)
    room = min(sizes.gpu_tokens, given.config.model_config.max_model_len)
    if arguments.load == "open" and sizes.longest > room:
        raise BenchmarkError(
            f"--load open: a session may have {sizes.longest} tokens, and the engine has room for "
            f"{room}: raise --gpu-tokens and --max-model-len, or lower --history-max."
        )
    native = any(each.partition(":")[0] == "native" for each in arguments.arms)
    if native and current_platform.is_cpu():
        raise BenchmarkError(
            "--arms native: vLLM's own offloading runs on no CPU: leave it away (--arms none ours)."
        )
    if arguments.seconds:
        # Two rounds of sessions take half of it at most.
        most = arguments.seconds / (4 * len(arguments.arms))
        sizes = replace(sizes, session_seconds=min(sizes.session_seconds, most))
    arms = [read_arm(name, sizes, given) for name in arguments.arms]
    rows = compare(arms, given, sizes, arguments)
    commands = {column: text for arm in arms for column, text in arm.commands.items()}
    print(table(rows, cell), flush=True)
    first = [row for row in rows if "cached" in row.figures]
    drawn = panels(first, "size", {"first_token_ms": "ms to the first token"})
    write_files(arguments, rows, drawn, commands)
    print(advice(rows, commands))
    return 1 if any(row.figures.get("errors") for row in rows) else 0
