"""What trees do in tool calls: steps with a full tree, and why the others have less.

    python -m benchmarks.tool_calls tests/pair --nodes 15 --topk 4 --steps 4

PAIR holds `target/`, `eagle3/` and `prompts.json`, as `tests/pair` does. An engine in this process
(on a GPU, if there is one) gets requests of three workloads. Tool calls are bound to the JSON
schema of one of a few tools, as vLLM binds a call that a user requires; their prompts hold earlier
calls, as those of an agent do. The second workload adds penalties. Free text continues the pair's
prompts. Half of the requests are greedy, half have a temperature of 1 and a seed. `--ngram` lets
n-grams of a request's text join its trees. A row of the table is a workload. Its columns:

steps        steps of the engine that verified trees, from our metrics
trees        verified trees, one per request and step, from our metrics
full         the share of a request's steps behind its prompt that verified as many nodes as asked
less         why the others verified fewer, or none
chains       the share of trees that have one branch, as all trees of such requests once had; an
             n-gram may fill a tree by itself
permitted    the share of a grammar's nodes that can be reached under its masks
accepted     the acceptance length: tokens that a request gets from a step, from our metrics
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.support.engines.gpu_engines import exact_engine
from tests.support.engines.pairs import Pair, counter
from vllm_graft.base import markdown
from vllm_graft.bench.common import report
from vllm_graft.testing import model_runner

_TEXT = {"type": "string", "pattern": "^[a-z_. ]{3,24}$"}
_PATH = {"type": "string", "pattern": "^[a-z_]{2,12}/[a-z_]{2,12}\\.py$"}


def _tool(name: str, **arguments: dict[str, Any]) -> dict[str, Any]:
    """The schema of a call: the tool's name and its arguments, all of them required."""
    inner = {
        "type": "object",
        "properties": arguments,
        "required": list(arguments),
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": inner},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


TOOLS: tuple[dict[str, Any], ...] = (
    _tool("search_code", query=_TEXT, whole_words={"type": "boolean"}),
    _tool("read_file", path=_PATH, first_line={"type": "integer", "minimum": 1, "maximum": 999}),
    _tool("set_unit", unit={"enum": ["celsius", "fahrenheit"]}, city=_TEXT),
    _tool("rename", path=_PATH, names={"type": "array", "items": _TEXT, "maxItems": 3}),
)
"""Calls of the kinds that agents make: free text, paths, numbers, enums, flags and lists."""

EARLIER: tuple[dict[str, Any], ...] = (
    {"query": "def read", "whole_words": True},
    {"path": "lib/parser.py", "first_line": 12},
    {"unit": "celsius", "city": "san jose"},
    {"path": "lib/token.py", "names": ["next_token", "line"]},
)
"""Arguments of a call of each tool that a prompt holds."""


WORKLOADS = ("tool calls", "tool calls, penalties", "free text")

LESS = ("none drafted", "context ends", "token budget", "chosen number")
"""Why a step verifies fewer nodes for a request than were asked for."""


def why_less(drafts: int, asked: int, position: int, room: int, budget_left: int) -> str | None:
    """Why a request verifies fewer nodes in a step than the engine was asked for.

    Args:
        drafts: nodes that the step verifies.
        asked: nodes that the engine was asked for.
        position: tokens that the request has computed.
        room: tokens that a request may have.
        budget_left: rows that the step could still have computed.

    Returns:
        One of `LESS`; None for a full tree.
    """
    if drafts >= asked:
        return None
    # The root, the nodes, and the token behind them.
    if position + asked + 2 > room:
        return "context ends"
    if budget_left == 0:
        return "token budget"
    return "chosen number" if drafts else "none drafted"


def is_chain(parents: Sequence[int]) -> bool:
    """Whether nodes, given the parent of each, are one branch: a chain below the root, node 0."""
    return list(parents) == list(range(len(parents)))


@dataclass
class Seen:
    """What an engine did for the requests of one workload."""

    steps: int = 0
    """Steps of single requests behind their prompts."""
    less: Counter[str] = field(default_factory=Counter)
    """Those with less than a full tree, by reason."""
    trees: int = 0
    chains: int = 0
    masked: int = 0
    """Nodes of trees that a grammar walked."""
    permitted: int = 0
    """Those of them that can be reached under its masks."""
    counted: Counter[str] = field(default_factory=Counter)
    """What our metrics counted: steps, trees, nodes accepted."""
    answers: list[str] = field(default_factory=list)

    def row(self, name: str) -> list[str]:
        """The workload's row of the table."""
        less = [f"{count} {reason}" for reason, count in sorted(self.less.items())]
        counted = self.counted
        return [
            name,
            str(counted["steps"]),
            str(counted["trees"]),
            _share(self.steps - self.less.total(), self.steps),
            ", ".join(less) or "-",
            _share(self.chains, self.trees),
            _share(self.permitted, self.masked),
            f"{1 + counted['nodes_accepted'] / counted['trees']:.2f}" if counted["trees"] else "-",
        ]


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def read_counters(llm: Any) -> Counter[str]:
    """What our metrics have counted since the engine's start."""
    names = ("steps", "trees", "nodes_accepted")
    return Counter({name: int(counter(llm, f"vllm:graft_tree_{name}")) for name in names})


@contextlib.contextmanager
def watching(llm: Any, asked: int) -> Iterator[Callable[[], Seen]]:
    """Count what an engine of this process does; the function begins to count anew."""
    from vllm_graft.spec_decode.grammars.node_masks import NodeMasks

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    context = model_runner(llm).speculator.context
    seen = [Seen()]
    schedule, begin, fill, reach = (
        scheduler.schedule,
        context.begin,
        NodeMasks.fill,
        NodeMasks._fill,
    )

    def scheduled(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        left = scheduler.max_num_scheduled_tokens - output.total_num_scheduled_tokens
        for name, rows in output.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            position = request.num_computed_tokens - rows
            if position < request.num_prompt_tokens:
                continue
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            seen[0].steps += 1
            reason = why_less(drafts, asked, position, scheduler.max_model_len, left)
            if reason is not None:
                seen[0].less[reason] += 1
        return output

    def begun(batch: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = batch.num_draft_tokens_per_req
        for row, count in enumerate([] if drafts is None else drafts):
            if count:
                slot = batch.idx_mapping_np[row]
                seen[0].trees += 1
                seen[0].chains += is_chain(context.tree.parents[slot, 1 : 1 + count].tolist())
        return begin(batch, *args, **kwargs)

    def filled(self: NodeMasks) -> None:
        seen[0].masked += len(self._tree.tokens) - 1
        fill(self)

    def reached(self: NodeMasks, node: int) -> None:
        seen[0].permitted += 1
        reach(self, node)

    def anew() -> Seen:
        seen[0] = Seen()
        return seen[0]

    patched: list[tuple[Any, str, Any]] = [
        (scheduler, "schedule", scheduled),
        (context, "begin", begun),
        (NodeMasks, "fill", filled),
        (NodeMasks, "_fill", reached),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, instead in patched:
            stack.enter_context(mock.patch.object(owner, name, instead))
        yield anew


def earlier_calls(number: int) -> str:
    """The prompt of a tool call: the calls before it, one per line, the wanted tool's last."""
    order = [*range(number + 1, number + len(TOOLS)), number]
    return "".join(
        json.dumps(
            {"name": _name(TOOLS[each % len(TOOLS)]), "arguments": EARLIER[each % len(TOOLS)]},
            separators=(",", ":"),
        )
        + "\n"
        for each in order
    )


def _name(tool: dict[str, Any]) -> str:
    return str(tool["properties"]["name"]["const"])


def parameters(workload: str, count: int, tokens: int) -> list[Any]:
    """Sampling parameters of a workload: greedy and seeded requests in turns."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    def one(number: int) -> SamplingParams:
        given: dict[str, Any] = {"max_tokens": tokens}
        given |= {"seed": number} if number % 2 else {"temperature": 0}
        if workload.startswith("tool calls"):
            # Both kinds of request call each tool.
            schema = TOOLS[number // 2 % len(TOOLS)]
            given["structured_outputs"] = StructuredOutputsParams(json=schema)
        else:
            given["ignore_eos"] = True
        if workload.endswith("penalties"):
            given |= {"frequency_penalty": 0.5, "repetition_penalty": 1.1}
        return SamplingParams(**given)

    return [one(number) for number in range(count)]


def measure(llm: Any, arguments: argparse.Namespace, prompts: Sequence[str]) -> dict[str, Seen]:
    """Run each workload, and count what the engine did."""
    found = {}
    with watching(llm, arguments.nodes) as anew:
        for workload in arguments.workloads:
            asked = parameters(workload, arguments.requests, arguments.tokens)
            before, seen = read_counters(llm), anew()
            texts = [
                earlier_calls(number // 2)
                if workload.startswith("tool calls")
                else prompts[number % len(prompts)]
                for number in range(len(asked))
            ]
            outputs = llm.generate(texts, asked, use_tqdm=False)
            seen.counted = read_counters(llm) - before
            seen.answers = [output.outputs[0].text for output in outputs]
            found[workload] = seen
    return found


def engine(arguments: argparse.Namespace, pair: Pair) -> contextlib.AbstractContextManager[Any]:
    """An engine in float32 with trees, on a GPU if there is one."""
    tree: dict[str, Any] = {"topk": arguments.topk, "steps": arguments.steps}
    if arguments.ngram:
        given = arguments.reference
        tree["ngram"] = {} if given is None else {"reference": given}
    options: dict[str, Any] = {
        "max_model_len": 512,
        # Blank lines between its parts are legal in JSON, and a small model writes many.
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    if torch.cuda.is_available():
        return exact_engine(
            pair.target, draft=pair.draft, nodes=arguments.nodes, tree=tree, **options
        )
    return pair.engine(nodes=arguments.nodes, tree=tree, **options)


def run(arguments: argparse.Namespace) -> None:
    """Print a row for each workload."""
    report.require_folder("--json", arguments.json)
    pair = Pair.load(arguments.pair)
    with engine(arguments, pair) as llm:
        found = measure(llm, arguments, pair.prompts)
    titles = ["workload", "steps", "trees", "full", "less", "chains", "permitted", "accepted"]
    print(markdown.table(titles, [seen.row(name) for name, seen in found.items()]))
    if arguments.json:
        report.write_json(arguments.json, {name: vars(seen) for name, seen in found.items()})


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pair", type=Path)
    parser.add_argument("--nodes", type=int, default=15)
    parser.add_argument("--topk", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--requests", type=int, default=8, help="of each workload")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer at most")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--ngram", action="store_true", help="n-grams join the trees")
    parser.add_argument(
        "--reference", type=int, help="tokens of a schema that n-grams are found in; 0 for none"
    )
    parser.add_argument("--json", metavar="FILE", help="write what was counted, and the answers")
    arguments = parser.parse_args(given)
    return report.exit_status("tool_calls.py", functools.partial(run, arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
