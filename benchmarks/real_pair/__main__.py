"""A real model with a head of its own on a real server, as it is or in the shapes of an 8B model.

    python -m benchmarks.real_pair fetch WORK            # with a network: model, conversations
    vllm-graft train WORK/target --texts WORK/train.json --out WORK/eagle3
    python -m benchmarks.real_pair widen WORK WIDE       # both, at an 8B model's cost
    python -m benchmarks.real_pair serve WIDE --json serve.json
    python -m benchmarks.real_pair table serve.json [other.json ...]

The model is SmolLM2-135M-Instruct with an EAGLE-3 head. `fetch --target qwen2.5-coder-1.5b --draft
qwen2.5-coder-0.5b` takes a larger one, with a draft model beside it, and `serve WORK` measures it
as it is. The conversations are ShareGPT's, with functions of Python's library among those to train
on. One in sixteen is held out: the head's training never sees it. All measurements are of these,
and of HumanEval. `fetch` needs the package `gguf`, and `serve` needs `pandas`.

A machine without a network gets the models in parts: carry `target` and `draft_model` without
`model.safetensors`, and the files of `parts`, which `join` puts together there. A head comes back
as `head.safetensors`, which `pack` makes of `eagle3` there, and of which `expand` makes it here.

WORK and WIDE are pairs as `vllm-graft bench trees` takes them, which measures tokens per second
without a server; `serve` measures what users of one feel, too. `widen` needs 20 GB of a GPU, and
`serve` as much for each arm of a widened pair.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.real_pair import cells
from benchmarks.real_pair.targets import TARGETS
from benchmarks.real_pair.workloads import WORKLOADS
from vllm_graft.bench.common import report

PROMPTS, PROMPT_CHARACTERS = 128, 240


def fetch(arguments: argparse.Namespace) -> None:
    """Download the models, the conversations and the tasks."""
    from benchmarks.real_pair import pretrained

    arguments.work.mkdir(parents=True, exist_ok=True)
    pretrained.fetch_model(TARGETS[arguments.target], arguments.work / "target")
    if arguments.draft:
        pretrained.fetch_model(TARGETS[arguments.draft], arguments.work / "draft_model")
    pretrained.fetch_texts(arguments.work, arguments.conversations, arguments.functions)
    write_prompts(arguments.work)


def join(arguments: argparse.Namespace) -> None:
    """Put parts of a model into its folder; without any, check that all of them are there."""
    from benchmarks.real_pair import quantised

    began = time.perf_counter()
    if arguments.parts:
        quantised.put_all(arguments.parts, arguments.folder)
    else:
        quantised.check(arguments.folder, arguments.seconds)
    print(f"{arguments.folder}: {time.perf_counter() - began:.1f} s", flush=True)


def write_prompts(work: Path) -> None:
    """Write short held-out questions, in the chat template, where a pair has its prompts."""
    from transformers import AutoTokenizer

    from benchmarks.real_pair import pretrained
    from benchmarks.real_pair.conversations import first_prompt, messages

    tokenizer: Any = AutoTokenizer.from_pretrained(str(work / "target"))
    found = pretrained.read_conversations(work, "held_out")
    short = [each for each in found if len(first_prompt(each)) <= PROMPT_CHARACTERS]
    prompts = [
        tokenizer.apply_chat_template(
            messages(each)[:1], tokenize=False, add_generation_prompt=True
        )
        for each in short[:PROMPTS]
    ]
    (work / "prompts.json").write_text(json.dumps(prompts, indent=1) + "\n")


def pack(arguments: argparse.Namespace) -> None:
    """Put a pair's `eagle3` into one file that travels."""
    from benchmarks.real_pair.packing import pack_head

    pack_head(arguments.work / "eagle3", arguments.work / "head.safetensors")


def expand(arguments: argparse.Namespace) -> None:
    """Make a pair's `eagle3` of the head that came back from another machine."""
    from benchmarks.real_pair.packing import expand_head

    expand_head(arguments.file, arguments.work / "eagle3")


def widen(arguments: argparse.Namespace) -> None:
    """Write the pair in the shapes of an 8B model."""
    import torch

    from benchmarks.real_pair import widening

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wide = widening.Shape()
    began = time.perf_counter()
    if "target" in arguments.parts:
        widening.widen_target(arguments.work, arguments.wide, wide, device)
    if "draft" in arguments.parts:
        widening.widen_draft(arguments.work, arguments.wide, wide, device)
    for name in ("prompts.json", "held_out.json"):
        if (arguments.work / name).exists():
            shutil.copy(arguments.work / name, arguments.wide / name)
    print(f"widened in {time.perf_counter() - began:.0f} s", flush=True)


def serve(arguments: argparse.Namespace) -> None:
    """Measure all arms on servers of their own, which take turns."""
    from benchmarks.real_pair import serving

    report.require_folder("--json", arguments.json)
    until = time.perf_counter() + (math.inf if arguments.seconds is None else arguments.seconds)
    arguments.logs.mkdir(parents=True, exist_ok=True)
    load = serving.load_of(arguments.pair, arguments.workloads, arguments.logs)
    chosen = [
        cells.Cell(temperature, batch, rate, asked.partition("=")[0])
        for temperature in arguments.temperature
        for asked in arguments.workloads
        for batch, rate in [
            *((batch, 0.0) for batch in arguments.batch),
            *((arguments.max_num_seqs, rate) for rate in arguments.rates),
        ]
    ]
    settings = {name: str(value) for name, value in vars(arguments).items()}
    race = serving.Race(load, arguments.json, settings)
    with serving.servers(arguments.pair, arguments, arguments.logs) as running:
        race.warm_up(running, chosen)
        race.run(running, chosen, arguments.rounds, arguments.cell_seconds, until)
        # Servers take their time to end.
        tables = [cells.every_arm(race.found), cells.headline([race.found])]
        if arguments.rates:
            tables.append(cells.sustained(race.found))
        print(*tables, sep="\n\n", flush=True)


def table(arguments: argparse.Namespace) -> None:
    """Print the tables of one or several runs."""
    runs = [cells.read(file) for file in arguments.files]
    for file, run in zip(arguments.files, runs, strict=True):
        print(f"{file}\n{cells.every_arm(run)}\n")
    print(cells.headline(runs))


def workload(text: str) -> str:
    """Read ``NAME`` or ``NAME=FILE``.

    Raises:
        ArgumentTypeError: there is no such workload or file.
    """
    name, told, file = text.partition("=")
    if not (Path(file).is_file() if told else name in WORKLOADS):
        wanted = "a file" if told else f"one of {', '.join(WORKLOADS)}"
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return text


def add_fetch(each: argparse.ArgumentParser) -> None:
    """Add the arguments of `fetch`."""
    each.add_argument("work", type=Path)
    each.add_argument("--target", choices=TARGETS, default="smollm2-135m")
    each.add_argument("--draft", choices=TARGETS, help="a model for the method draft_model")
    each.add_argument("--conversations", type=int, default=20000)
    each.add_argument("--functions", type=int, default=3000, help="to train on, beside those")


def add_join(each: argparse.ArgumentParser) -> None:
    """Add the arguments of `join`."""
    each.add_argument("folder", type=Path)
    each.add_argument("parts", nargs="*", type=Path)
    each.add_argument("--seconds", type=float, default=0, help="to wait for others that put parts")


def add_pack(each: argparse.ArgumentParser) -> None:
    """Add the arguments of `pack`."""
    each.add_argument("work", type=Path)


def add_expand(each: argparse.ArgumentParser) -> None:
    """Add the arguments of `expand`."""
    each.add_argument("work", type=Path)
    each.add_argument("file", type=Path)


def add_widen(each: argparse.ArgumentParser) -> None:
    """Add the arguments of `widen`."""
    each.add_argument("work", type=Path)
    each.add_argument("wide", type=Path)
    each.add_argument("--parts", nargs="+", default=["target", "draft"])


def add_serve(each: argparse.ArgumentParser) -> None:
    """Add the arguments of `serve`."""
    each.add_argument("pair", type=Path)
    each.add_argument("--arms", nargs="+", default=["auto:63+fp8", "block:3+fp8", "block:5+fp8"])
    each.add_argument(
        "--workloads",
        nargs="+",
        type=workload,
        default=["chat"],
        metavar="NAME[=FILE]",
        help=f'{" or ".join(WORKLOADS)}, or requests of a file: JSONL of vLLM\'s dataset "custom"',
    )
    each.add_argument("--batch", nargs="*", type=int, default=[1, 4, 16, 64])
    each.add_argument("--rates", nargs="*", type=float, default=[], help="requests per second")
    each.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    each.add_argument("--rounds", type=int, default=1)
    each.add_argument("--cell-seconds", type=float, default=10, help="of an arm's turn, roughly")
    each.add_argument("--seconds", type=float, help="for all of it, starts included")
    each.add_argument("--start-seconds", type=float, default=300, help="for the servers' start")
    each.add_argument("--topk", type=int, default=8)
    each.add_argument("--steps", type=int, default=12)
    each.add_argument("--max-num-seqs", type=int, default=64)
    each.add_argument("--max-model-len", type=int, default=2048)
    each.add_argument("--kv-cache-bytes", type=int, help="of each; they start together then")
    each.add_argument("--sizes", nargs="+", type=int, help="cudagraph_capture_sizes of all")
    each.add_argument(
        "--server-flags", type=shlex.split, default=[], help="more flags for all servers, as one"
    )
    each.add_argument("--logs", type=Path, default=Path("real-pair-logs"))
    each.add_argument("--json", metavar="FILE")


def add_table(each: argparse.ArgumentParser) -> None:
    """Add the arguments of `table`."""
    each.add_argument("files", nargs="+")


COMMANDS: tuple[tuple[Any, Callable[[argparse.ArgumentParser], None]], ...] = (
    (fetch, add_fetch),
    (join, add_join),
    (pack, add_pack),
    (expand, add_expand),
    (widen, add_widen),
    (serve, add_serve),
    (table, add_table),
)
"""What runs a command, whose name and help it has, and what adds the command's arguments."""


def parser() -> argparse.ArgumentParser:
    """The arguments of all commands."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.real_pair",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = found.add_subparsers(required=True)
    for run, add_arguments in COMMANDS:
        each = commands.add_parser(run.__name__, help=run.__doc__)
        each.set_defaults(run=run)
        add_arguments(each)
    return found


def main(given: list[str]) -> int:
    """Run one command."""
    arguments = parser().parse_args(given)
    work = functools.partial(arguments.run, arguments)
    return report.exit_status("benchmarks.real_pair", work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
