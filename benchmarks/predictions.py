"""Acceptance lengths of edits with a predicted answer, and of tool calls in their usual form.

    python -m benchmarks.predictions tests/pair --nodes 15 --topk 4 --steps 4

PAIR is a folder as for `benchmarks.tool_calls`. A small target can neither edit nor call tools, so
answers are *replayed*, as in `benchmarks.edits`: wherever the target draws, its token is replaced
by the answer's. All passes run as ever, and the draft proposes what it would for such a text. Each
row of the table is one engine's run of all requests of a workload:

edits        a part of a module of the standard library with one name changed; `prediction` sends
             the part as it was, as a user would, and `right` the answer itself
tool calls   JSON in the compact form that a grammar permits, in the tokens of the pair's tokenizer;
             `schema` is the reference that the engine makes of the schema

Each is compared with n-grams whose references are off, in the same engine. A column is

trees        verified trees, one per request and step, from our metrics
accepted     the acceptance length: tokens that a request gets from a step, from our metrics
in references  tokens of references, from our metrics
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.edits import answers_to, edits, replay
from benchmarks.tool_calls import TOOLS, earlier_calls, engine
from tests.support.engines.pairs import Pair, counter
from vllm_graft.base import markdown
from vllm_graft.bench.common import report
from vllm_graft.spec_decode.lookup.references import References
from vllm_graft.spec_decode.trees.reference import KEY, NONE

OTHER: tuple[dict[str, Any], ...] = (
    {"query": "next token", "whole_words": False},
    {"path": "src/engine.py", "first_line": 240},
    {"unit": "fahrenheit", "city": "new york"},
    {"path": "src/reader.py", "names": ["read_line"]},
)
"""Arguments of the calls that are replayed: other ones than the prompts'."""


class Asked(NamedTuple):
    """A request whose answer is known.

    Attributes:
        prompt: the prompt.
        answer: what is emitted.
        params: sampling parameters.
    """

    prompt: str
    answer: str
    params: dict[str, Any]


def tool_calls(count: int, *, alone: bool) -> list[Asked]:
    """Calls of the tools in turns, behind earlier ones or, `alone`, behind none."""
    from vllm.sampling_params import StructuredOutputsParams

    asked = []
    for number in range(count):
        tool = TOOLS[number % len(TOOLS)]
        call = {
            "name": tool["properties"]["name"]["const"],
            "arguments": OTHER[number % len(OTHER)],
        }
        prompt = f"# Call number {number}:\n" if alone else earlier_calls(number)
        forced = StructuredOutputsParams(json=tool)
        answer = json.dumps(call, separators=(",", ":"))
        asked.append(Asked(prompt, answer, {"structured_outputs": forced}))
    return asked


def predicted(count: int, characters: int, *, right: bool) -> list[Asked]:
    """Edits whose predictions are the answers or, not `right`, the parts before the edit."""
    found = []
    for case in edits(count, characters):
        before = case.prompt.rpartition("\n# The same code")[0]
        prediction = case.answer if right else before
        found.append(Asked(case.prompt, case.answer, {"extra_args": {KEY: prediction}}))
    return found


class Row(NamedTuple):
    """One run of a workload."""

    workload: str
    reference: str
    tokens: int
    trees: int
    accepted: float
    in_references: int


def measure(llm: Any, workload: str, reference: str, asked: Sequence[Asked]) -> Row:
    """Run a workload in an engine that replays its answers, and read our metrics.

    Raises:
        BenchmarkError: an answer is not the one that was replayed.
    """
    from vllm import SamplingParams

    tokenizer = llm.get_tokenizer()
    ids = [tokenizer.encode(each.answer, add_special_tokens=False) for each in asked]
    names = ("trees", "nodes_accepted", "reference_tokens")
    before = [counter(llm, f"vllm:graft_tree_{name}") for name in names]
    given = [
        SamplingParams(temperature=0, max_tokens=len(answer), ignore_eos=True, **each.params)
        for each, answer in zip(asked, ids, strict=True)
    ]
    outputs = llm.generate([each.prompt for each in asked], given, use_tqdm=False)
    for output, answer in zip(outputs, ids, strict=True):
        if list(output.outputs[0].token_ids) != answer:
            raise report.BenchmarkError("an answer was not replayed to its end")
    after = [counter(llm, f"vllm:graft_tree_{name}") for name in names]
    trees, accepted, tokens = (int(new - old) for new, old in zip(after, before, strict=True))
    return Row(workload, reference, sum(map(len, ids)), trees, 1 + accepted / trees, tokens)


def run(arguments: argparse.Namespace) -> None:
    """Print a row for each run."""
    report.require_folder("--json", arguments.json)
    count, characters = arguments.requests, arguments.characters
    with engine(arguments, Pair.load(arguments.pair)) as llm:
        # Their parameters import vLLM, which the engine has prepared for this device.
        runs = [
            ("edits", "prediction", predicted(count, characters, right=False)),
            ("edits", "right", predicted(count, characters, right=True)),
            ("tool calls after others", "schema", tool_calls(count, alone=False)),
            ("tool calls", "schema", tool_calls(count, alone=True)),
        ]
        asked_all = [each for *_, asked in runs for each in asked]
        llm.collective_rpc(replay, args=(answers_to(asked_all, llm.get_tokenizer()),))
        rows = []
        for workload, reference, asked in runs:
            with mock.patch.object(References, "of", return_value=NONE):
                rows.append(measure(llm, workload, "none", asked))
            rows.append(measure(llm, workload, reference, asked))
    titles = ["workload", "reference", "tokens", "trees", "accepted", "in references"]
    texts = [[*map(str, row[:4]), f"{row.accepted:.2f}", str(row.in_references)] for row in rows]
    print(markdown.table(titles, texts))
    if arguments.json:
        report.write_json(arguments.json, [row._asdict() for row in rows])


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pair", type=Path)
    parser.add_argument("--nodes", type=int, default=15)
    parser.add_argument("--topk", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--requests", type=int, default=4, help="of each workload")
    parser.add_argument("--characters", type=int, default=400, help="of a part that is edited")
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    parser.set_defaults(ngram=True, reference=None)
    return report.exit_status("predictions.py", functools.partial(run, parser.parse_args(given)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
