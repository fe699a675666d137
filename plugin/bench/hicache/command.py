"""Host KV-cache connectors side by side: none, vLLM's own (`native`) and ours.

    vllm-graft bench hicache --model MODEL            (one GPU)
    vllm-graft bench hicache --tiny --device cpu      (no GPU: checks the benchmark only)

All arms are up at the same time, each in a process of its own, and take turns. Parts: `copy` (GB/s
of our copies beside memcpy), `ttft` (a long prefix that only the host still has, and a new suffix),
`decode` (tokens per second while K/V is written back), `load` (concurrent multi-turn sessions with
more K/V than the device holds), `race` (full hits in FULL CUDA graphs with slow copies; their
tokens must be right). Rows are printed, and written to --json, as they come; the tables come at the
end, --seconds after the beginning at the latest. A part that fails costs no other part its rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from vllm_graft.bench.hicache.model_sizes import TINY, Sizes
from vllm_graft.bench.hicache.run import Run, say

SUMMARY = "a host KV cache beside vLLM's own and none: first tokens, decoding, load, races"
PARTS = ("copy", "ttft", "decode", "load", "race")


def add_arguments(found: argparse.ArgumentParser) -> None:
    """Add the benchmark's own arguments; ``--json`` and ``--plot`` are there already."""
    found.add_argument("--model", type=Path, help="checkpoint folder (default: made-up 8B weights)")
    found.add_argument("--load-format", default="auto", help="of the model, as vLLM's own flag")
    found.add_argument("--race-model", type=Path, help="of the race (default: a small one is made)")
    found.add_argument("--arms", nargs="+", default=["none", "native", "ours"])
    found.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    found.add_argument("--seconds", type=float, default=900, help="limit of the whole run")
    found.add_argument("--part-seconds", type=float, default=60, help="limit of a part on an arm")
    found.add_argument("--no-compile", action="store_true", help="start sooner: eager prefills")
    found.add_argument("--race-count", type=int, default=5000)
    found.add_argument("--race-loads", nargs="+", default=["layerwise", "async"])
    found.add_argument("--one-by-one", action="store_true", help="start engines one by one")
    found.add_argument("--connector-module", help="where our connector is not known by name")
    found.add_argument("--connector", default="HiCacheConnector")
    found.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="change a size")


def sizes_of(arguments: argparse.Namespace) -> Sizes:
    """Return the sizes that the arguments ask for.

    Raises:
        SystemExit: a name is not a size, or its value is not a number.
    """
    sizes = TINY if arguments.tiny else Sizes()
    known = {field.name: getattr(sizes, field.name) for field in dataclasses.fields(sizes)}
    for change in arguments.set:
        name, _, value = change.partition("=")
        if name not in known:
            sys.exit(f"--set {change}: sizes are {', '.join(known)}")
        try:
            if isinstance(known[name], tuple):
                known[name] = tuple(int(part) for part in value.split(","))
            else:
                known[name] = type(known[name])(value)
        except ValueError:
            sys.exit(f"--set {change}: {value!r} is not a number")
    return Sizes(**known)


def describe_machine() -> str:
    """Describe the machine in a line. vLLM's own connector keeps K/V in `/dev/shm`."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    shm = shutil.disk_usage("/dev/shm").free / 2**30 if Path("/dev/shm").exists() else 0
    cores = len(os.sched_getaffinity(0))
    return f"{device}, {cores} cores, torch {torch.__version__}, {shm:.0f} GiB free in /dev/shm"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and run, without ``vllm-graft bench``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="write what was measured here")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw it here (needs matplotlib)")
    return run(parser.parse_args(argv))


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark. The status is 1 if an arm failed or an answer was wrong."""
    parts = [part for part in arguments.only.split(",") if part]
    if unknown := [part for part in parts if part not in PARTS]:
        sys.exit(f"--only {','.join(unknown)}: parts are {', '.join(PARTS)}")
    sizes = sizes_of(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        make_models(arguments, Path(scratch))
        one = Run(arguments, sizes)
        # Shut the engines down when a time limit ends the run.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        say(describe_machine())
        try:
            one.run(parts)
        finally:
            one.finish()
            one.close()
    bad = [row for row in one.report.rows if row.get("error") or row.get("wrong")]
    return 1 if bad else 0


def _as_8b(file: Path) -> None:
    """Give a small Llama the shapes of Llama-3.1-8B; its weights are made up on the device."""
    shapes = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    }
    file.write_text(json.dumps({**json.loads(file.read_text()), **shapes}))


def make_models(arguments: argparse.Namespace, scratch: Path) -> None:
    """Write the checkpoints that were not given; the race's is small, as it is not timed."""
    from vllm_graft.testing import write_llama
    from vllm_graft.testing.models.llama import TinyShape

    if arguments.model is None:
        arguments.model = write_llama(scratch / "made-up")
        if not arguments.tiny:
            _as_8b(arguments.model / "config.json")
            arguments.load_format = "dummy"
    if arguments.race_model is None and arguments.device == "cpu":
        arguments.race_model = arguments.model
    elif arguments.race_model is None:
        shape = TinyShape(
            vocab_size=8192,
            hidden_size=512,
            intermediate_size=1408,
            num_layers=8,
            num_heads=4,
            num_kv_heads=4,
            head_dim=128,
            max_positions=16384,
        )
        arguments.race_model = write_llama(scratch / "race", shape)
