"""An MTP module and a DSpark head for the lab's pair, and a race of trees against stock's chains.

    python -m benchmarks.lab_heads answers PAIR WORK      # the target's own, to learn from
    python -m benchmarks.lab_heads train PAIR WORK mtp    # or dspark; says what it accepts
    python -m benchmarks.lab_heads accept PAIR WORK mtp   # on a CPU: accepted in vLLM's engines
    python -m benchmarks.lab_heads lengths PAIR WORK      # of a DSpark head's trees, on a CPU
    python -m benchmarks.lab_heads widen PAIR WORK mtp WIDE  # both, at an 8B model's cost
    python -m benchmarks.lab_heads race WIDE mtp --json race.json

PAIR holds `target/`, a Llama, and `prompts.json`. WORK gets `answers.safetensors` and the folders
`mtp` and `dspark`; `widen` and `accept` need these alone. The prompts that answers begin with are
cut from the standard library of the Python that runs this, whose files are learned from as well,
but for one file in twenty, which are for measuring. No network is used.

`race` starts an engine of stock's and one of ours, as `vllm-graft bench trees` does. They take
turns at each temperature and batch. Stock's engine drafts chains of each of `--lengths`; from the
second round on, lengths whose rate was below `--keep` of the best at a cell are left out there.
Medians over the rounds are compared with the bars.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_graft.bench.common import report

KINDS = ("mtp", "dspark")
TEMPERATURES = (0.0, 0.6, 1.0)


def answers(arguments: argparse.Namespace) -> None:
    """Have the target continue pieces of Python sources."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from benchmarks.lab_heads import sources
    from benchmarks.real_pair import generation, texts

    folder = str(arguments.pair / "target")
    cuda = torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = list(sources.tokenized(sources.standard_library(), tokenizer))
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16 if cuda else torch.float32
    )
    model = model.to("cuda" if cuda else "cpu").eval()
    written = []
    for held_out, temperatures, count in (
        (True, (0.0, 1.0), arguments.held_out),
        (False, TEMPERATURES, arguments.answers),
    ):
        written += generation.generate(
            model,
            sources.turns(found, temperatures, count, held_out, seed=int(held_out)),
            seconds=arguments.seconds,
            max_tokens=arguments.max_tokens,
            held_out=held_out,
            rows=arguments.rows,
        )
    arguments.work.mkdir(parents=True, exist_ok=True)
    texts.write_texts(written, arguments.work / "answers.safetensors")


def train(arguments: argparse.Namespace) -> None:
    """Train a drafter on the answers and on Python sources, and measure it."""
    import torch

    from benchmarks.lab_heads import files, learning, making, target_states

    run = learning.Run(
        torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        arguments.seconds,
        arguments.steps,
        arguments.rate,
        seed=arguments.seed,
    )
    torch.set_float32_matmul_precision("high")
    learned, held_out = making.texts_of(
        arguments.pair, arguments.work, arguments.longest, arguments.written
    )
    print(f"{len(learned)} texts to learn from, {len(held_out)} held out", flush=True)
    torch.manual_seed(run.seed)
    sizes = making.Sizes(
        arguments.depth, arguments.layers, arguments.rank, arguments.share, arguments.blocks
    )
    made = making.MAKERS[arguments.kind](arguments.pair, run.device, sizes)
    given = target_states.reads(
        made.target, learned, arguments.tokens, arguments.longest, arguments.kept, run.seed
    )
    if arguments.start:
        files.load_weights(made.lesson.drafter, arguments.start)
    else:
        first, given = learning.beginning(given, arguments.begin)
        made.lesson.begin(first)
    found: dict[str, Any] = {"settings": settings_of(arguments)}
    found["before"] = judge(made, held_out, arguments)
    began = time.perf_counter()
    losses = learning.learn(made.lesson, given, run)
    print(f"{len(losses)} steps in {time.perf_counter() - began:.0f} s", flush=True)
    made.save(arguments.work / arguments.kind)
    found |= {"steps": len(losses), "losses": losses[::20]}
    found["after"] = judge(made, held_out, arguments)
    report.write_json(str(arguments.work / f"{arguments.kind}.json"), found)


def settings_of(arguments: argparse.Namespace) -> dict[str, str]:
    """What a file of results notes of a command."""
    return {name: str(value) for name, value in vars(arguments).items() if name != "run"}


def judge(made: Any, held_out: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Acceptance by temperature of the held-out answers."""
    from benchmarks.lab_heads import learning

    found = {}
    for temperature in sorted({text.temperature for text in held_out}):
        shown = [text for text in held_out if text.temperature == temperature]
        accepted = learning.acceptance(
            made.lesson, made.target, shown, arguments.tokens, arguments.longest
        )
        print(f"held out, temperature {temperature:g}: {accepted}", flush=True)
        found[f"{temperature:g}"] = asdict(accepted)
    return found


def accept(arguments: argparse.Namespace) -> None:
    """Measure acceptance lengths in vLLM's engines on a CPU, beside a random drafter's."""
    # This has to come before anything imports Triton or vLLM.
    from vllm_graft.testing.interpreter import install as interpreter

    interpreter.install()
    from benchmarks.lab_heads import accepting

    report.require_folder("--json", arguments.json)
    load = accepting.Load(arguments.prompts, arguments.tokens, arguments.temperature)
    rows = accepting.run(
        arguments.pair, arguments.work, arguments.kind, arguments.arms, load, arguments.prompt
    )
    print(accepting.table(rows), flush=True)
    if arguments.json:
        report.write_json(arguments.json, [asdict(row) for row in rows])


def lengths(arguments: argparse.Namespace) -> None:
    """Compute acceptance lengths of a DSpark head's trees without an engine."""
    import torch

    from benchmarks.lab_heads import block_lengths

    with torch.inference_mode():
        found = block_lengths.measure(
            arguments.pair,
            arguments.work / "dspark",
            arguments.shapes,
            arguments.chains,
            arguments.temperature,
            texts=arguments.texts,
            prompt=arguments.prompt,
            tokens=arguments.tokens,
        )
    print(found.table(arguments.temperature), flush=True)


def shape_of(text: str) -> tuple[int, int, int]:
    """Read ``topk,steps,nodes``."""
    from benchmarks.tree_lengths import read_shape

    return read_shape(text)


def widen(arguments: argparse.Namespace) -> None:
    """Write the target and a drafter in the shapes of an 8B model."""
    import shutil

    import torch

    from benchmarks.lab_heads import wide
    from benchmarks.real_pair.widening import Shape

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began = time.perf_counter()
    make = {"mtp": wide.widen_mtp, "dspark": wide.widen_dspark}[arguments.kind]
    drafter = arguments.work / arguments.kind
    make(arguments.pair / "target", drafter, arguments.wide, Shape(), device)
    shutil.copy(arguments.pair / "prompts.json", arguments.wide / "prompts.json")
    print(f"widened in {time.perf_counter() - began:.0f} s", flush=True)


def race(arguments: argparse.Namespace) -> None:
    """Measure trees beside stock's chains of the same drafter."""
    from benchmarks.lab_heads import racing

    report.require_folder("--json", arguments.json)
    racing.run(arguments, settings_of(arguments))


def add_training(each: argparse.ArgumentParser) -> None:
    """Add what `train` is told."""
    each.add_argument("--seconds", type=float, default=90)
    each.add_argument("--steps", type=int, default=10**9, help="at most")
    each.add_argument("--tokens", type=int, default=16384, help="of a batch")
    each.add_argument("--longest", type=int, default=400, help="tokens of a text")
    each.add_argument("--written", type=int, default=6000, help="pieces of sources besides")
    each.add_argument("--kept", type=int, default=0, help="batches that come again: for a CPU")
    each.add_argument("--start", type=Path, help="folder of a drafter to go on with")
    each.add_argument("--share", type=float, default=1.0, help="of places, for MTP's comparisons")
    each.add_argument("--blocks", type=int, default=24, help="of a text, for DSpark")
    each.add_argument("--begin", type=int, default=8, help="batches that weights begin with")
    each.add_argument("--rate", type=float, default=2e-3, help="learning rate")
    each.add_argument("--seed", type=int, default=0)
    each.add_argument("--depth", type=int, help="depths that are trained: 4 of MTP, 7 of DSpark")
    each.add_argument("--layers", type=int, default=2, help="layers of a DSpark head")
    each.add_argument("--rank", type=int, default=128, help="rank of a DSpark head's bias")


def add_racing(each: argparse.ArgumentParser) -> None:
    """Add what `race` is told."""
    each.add_argument("--lengths", nargs="+", type=int, help="of chains; MTP 1 2 3, DSpark 7")
    each.add_argument("--chains", default="block", help="chain, sampled, block or adaptive")
    each.add_argument("--nodes", type=int, default=63, help="of our trees, at most")
    each.add_argument("--topk", type=int, default=8)
    each.add_argument("--auto-steps", type=int, help="depth of trees: 4 with MTP, the block's")
    each.add_argument("--fp8-draft", action="store_true", help="drafts of both in FP8")
    each.add_argument(
        "--ours",
        nargs="+",
        default=["+fp8head"],
        help="suffixes of our engines, such as +fp8head+whole, or an empty one; or names of arms "
        "as `vllm-graft bench trees` has them, such as tree:7+fp8head",
    )
    each.add_argument(
        "--fixed",
        nargs="+",
        type=int,
        default=[],
        metavar="NODES",
        help="numbers of nodes that our engines with `auto` are measured with besides, each kept "
        "in all steps of a turn",
    )
    each.add_argument("--fp8-target", action="store_true", help="FP8 target and K/V of both")
    each.add_argument(
        "--options", type=json.loads, default={}, help="JSON: more options of vllm.LLM of both"
    )
    each.add_argument("--temperature", nargs="+", type=float, default=list(TEMPERATURES))
    each.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16, 64])
    each.add_argument("--tokens", type=int, default=192, help="of an answer")
    each.add_argument("--prompt", type=int, default=400, help="characters of a prompt")
    each.add_argument("--rounds", type=int, default=5)
    each.add_argument("--seconds", type=float, help="for all of it, starts included")
    each.add_argument("--keep", type=float, default=0.95)
    each.add_argument("--max-model-len", type=int, default=1024)
    each.add_argument("--sizes", nargs="+", type=int, help="cudagraph_capture_sizes of both")
    each.add_argument("--kv-cache-bytes", type=int, help="of each; they start together then")
    each.add_argument("--json", metavar="FILE")


def parser() -> argparse.ArgumentParser:
    """The arguments of all commands."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.lab_heads",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = found.add_subparsers(required=True)

    def command(run: Any, *places: str) -> argparse.ArgumentParser:
        each = commands.add_parser(run.__name__, help=run.__doc__)
        each.set_defaults(run=run)
        for place in places:
            each.add_argument(place, **({"choices": KINDS} if place == "kind" else {"type": Path}))
        return each

    each = command(answers, "pair", "work")
    each.add_argument("--seconds", type=float, default=45, help="for each of both kinds at most")
    each.add_argument("--answers", type=int, default=12288)
    each.add_argument("--held-out", type=int, default=512)
    each.add_argument("--max-tokens", type=int, default=256)
    each.add_argument("--rows", type=int, default=1024, help="answers that grow together")
    add_training(command(train, "pair", "work", "kind"))
    each = command(accept, "pair", "work", "kind")
    each.add_argument("--arms", nargs="+", help="chain:K and tree:N; without it the usual ones")
    each.add_argument("--prompts", type=int, default=8)
    each.add_argument("--prompt", type=int, default=400, help="characters of a prompt")
    each.add_argument("--tokens", type=int, default=64, help="of an answer")
    each.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    each.add_argument("--json", metavar="FILE")
    each = command(lengths, "pair", "work")
    each.add_argument("--shapes", nargs="+", type=shape_of, default=[(2, 3, 3), (8, 4, 14)])
    each.add_argument("--chains", nargs="+", type=int, default=[3, 7], help="above temperature 0")
    each.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    each.add_argument("--texts", type=int, default=8)
    each.add_argument("--prompt", type=int, default=100, help="tokens of a prompt")
    each.add_argument("--tokens", type=int, default=160, help="tokens behind it")
    command(widen, "pair", "work", "kind", "wide")
    add_racing(command(race, "pair", "kind"))
    return found


def main(given: list[str]) -> int:
    """Run one command."""
    arguments = parser().parse_args(given)
    work = functools.partial(arguments.run, arguments)
    return report.exit_status("benchmarks.lab_heads", work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
