"""Write a workload to a file, or the table of how often the answers of all workloads repeat.

    python -m benchmarks.workloads agent --out agent.jsonl
    vllm-graft bench trees MODEL --dataset agent.jsonl --prompt-tokens 8192 --tokens 512
    vllm bench serve --model MODEL --dataset-name custom --dataset-path agent.jsonl \\
        --custom-output-len -1 --disable-shuffle --no-oversample --num-prompts 240
    python -m benchmarks.workloads table

A line has the fields of `benchmarks.workloads.request.Request`. `vllm bench serve` sends `prompt`
alone: no JSON schemas, and no order of a session's requests. With `--tokenizer MODEL` that is in
the model's chat template, tools included: then give it `--skip-chat-template` as well.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.workloads.catalogue import WORKLOADS, repeats, requests_of
from benchmarks.workloads.request import pieces
from benchmarks.workloads.sources import Choice
from vllm_graft.base.text_table import markdown
from vllm_graft.bench.common import report


def table(arguments: argparse.Namespace, tokenizer: Any) -> str:
    """A row for each workload; a dash where a model's answers have to tell."""
    rows, split = [], pieces if tokenizer is None else tokenizer.encode
    for name, workload in WORKLOADS.items():
        requests = requests_of(name, arguments.count, arguments)
        tokens, *parts = repeats(requests, tokenizer)
        asked = sum(len(split(each.prompt)) for each in requests) / len(requests)
        cells = [f"{tokens / len(requests):.0f}", *(f"{part:.0%}" for part in parts)]
        rows.append([f"`{name}`", workload.about, f"{asked:.0f}", *(cells if tokens else "----")])
    places = ("own text", "other requests", "either")
    return markdown(["workload", "what is asked", "prompt", "answer", *places], rows)


def run(arguments: argparse.Namespace) -> None:
    tokenizer = None
    if arguments.tokenizer:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    if arguments.name == "table":
        print(table(arguments, tokenizer))
        return
    report.require_folder("--out", arguments.out)
    requests = requests_of(arguments.name, arguments.count, arguments)
    lines = [json.dumps(each.line(tokenizer)) for each in requests]
    Path(arguments.out).write_text("".join(f"{line}\n" for line in lines))
    said = f"wrote {len(requests)} requests to {arguments.out}; answers repeat"
    print(f"{said} {repeats(requests, tokenizer)}")


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.workloads",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=(*WORKLOADS, "table"))
    parser.add_argument("--out", metavar="FILE", help="(default: NAME.jsonl)")
    parser.add_argument("--count", type=report.positive, default=240, help="requests")
    parser.add_argument("--tokenizer", metavar="MODEL")
    Choice.add_flags(parser)
    arguments = parser.parse_args(given)
    arguments.out = arguments.out or f"{arguments.name}.jsonl"
    return report.exit_status(parser.prog, functools.partial(run, arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
