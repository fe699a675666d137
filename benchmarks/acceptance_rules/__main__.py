"""Compare how many drafts of sampled requests are accepted, by rules that are all exact.

    python -m benchmarks.acceptance_rules PAIR --shapes 1,3,3 1,5,5 4,4,6 8,4,14

PAIR holds `target/` (a Llama), `eagle3/` and `prompts.json`, as `tests/pair` does. Models run in
float32 without an engine. The target writes a text after each prompt, and from every few places of
it all rules take a whole speculative step, in which the draft reads its own tokens. So all rules
are compared at the same places. Places are evenly spread; steps of an engine begin more often at
hard ones, so that it has a few per cent less of all of them. A shape is topk, steps and nodes.

The first table has tokens per step. *Coupled* is what `spec_decode` does: drafts are ranked with
the noise of the target's draws, and the best nodes are kept. *Rejection* and *block* draw drafts
from the draft's distribution, and verify them node by node or as whole paths; for chains these are
standard rejection sampling and block verification. *Blind* trees are coupled, too, but grow as
those of rejection do: where a draft goes is decided before its token is known.

A second table has what these exceed the first column by, in per cent. Errors are standard errors,
where texts are what is drawn.

The last table has the chance that one of K children of a node is accepted, at nodes that chains
reached, and the bound of any exact rule for children that are drawn from the draft.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.acceptance_rules.decoding import Context, Setting, Texts
from benchmarks.acceptance_rules.growth import Chance
from benchmarks.acceptance_rules.one_node import Hits, hits
from benchmarks.pair_models import Head, Llama, read_weights, write
from benchmarks.tree_lengths import measure, read_prompts, read_shape
from vllm_graft.base import markdown
from vllm_graft.bench.common import report
from vllm_graft.spec_decode.heads.head import SHARPNESS
from vllm_graft.spec_decode.trees.shape import TreeShape

Lengths = Sequence[Sequence[int]]
"""Tokens of each step, by text."""

RULES = {"rejection": "recursive", "block": "traversal", "blind": "coupling"}
"""Names of columns, and of rules in `decoding`."""


def mean(texts: Lengths) -> tuple[float, float]:
    """Return tokens per step and their standard error, in which texts are what is drawn."""
    tokens, steps = [sum(text) for text in texts], [len(text) for text in texts]
    found = sum(tokens) / sum(steps)
    spread = sum((t - found * s) ** 2 for t, s in zip(tokens, steps, strict=True))
    count = len(texts)
    return found, math.sqrt(spread * count / max(1, count - 1)) / sum(steps)


def gain(texts: Lengths, others: Lengths) -> tuple[float, float]:
    """Return by how many per cent tokens per step exceed `others`, and the standard error.

    Both are of the same prompts, text by text, and what these have in common cancels out.
    """
    (value, _), (other, _) = mean(texts), mean(others)
    parts = [
        [(sum(text) / found - len(text)) / sum(map(len, each)) for text in each]
        for each, found in ((texts, value), (others, other))
    ]
    spread = sum((one - two) ** 2 for one, two in zip(*parts, strict=True))
    count, ratio = len(texts), value / other
    error = ratio * math.sqrt(spread * count / max(1, count - 1))
    return 100 * (ratio - 1), 100 * error


def cell(value: tuple[float, float]) -> str:
    return f"{value[0]:.3f} ± {value[1]:.3f}"


def per_cent(value: tuple[float, float]) -> str:
    return f"{value[0]:+.1f} ± {value[1]:.1f}"


class Study:
    """The pair, and what is asked about it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.asked = arguments
        self.target = Llama(arguments.pair)
        self.draft = read_weights(arguments.pair / "eagle3")
        self.prompts = read_prompts(arguments.pair, arguments.texts, arguments.prompt)

    def compared(self, temperature: float) -> list[dict[str, Lengths]]:
        """For each shape, lengths by rule at the same places of the same texts."""
        asked = self.asked
        deepest = max(steps for _, steps, _ in asked.shapes)
        places = range(0, asked.tokens - deepest - 1, asked.stride)
        written = write(self.target, self.prompts, asked.tokens, temperature)
        found: list[dict[str, list[list[int]]]] = [{} for _ in asked.shapes]
        for text in written:
            head = Head(self.draft, self.target, text)
            for factor in asked.sharpness:
                measured = measure(head, asked.shapes, temperature, factor)
                for columns, lengths in zip(found, measured, strict=True):
                    column = columns.setdefault(f"coupled {factor:g}", [])
                    column.append([lengths[place] for place in places])
        tokens = torch.stack([text.tokens for text in written])
        self._drawn(temperature, tokens, places, found)
        return [dict(columns) for columns in found]

    def _drawn(
        self,
        temperature: float,
        tokens: torch.Tensor,
        places: range,
        found: list[dict[str, list[list[int]]]],
    ) -> None:
        """Add trees that grow without a look at the tokens that are to be drawn."""
        asked, prompt = self.asked, self.asked.prompt
        rejecting = [rule for rule in asked.rules if RULES[rule] != "coupling"]
        together = [rejecting] if rejecting else []
        together += [[rule] for rule in asked.rules if rule not in rejecting]
        if not together:
            return
        # The depth is that of the deepest of the shapes, for which there has to be room.
        deepest = TreeShape(1, max(steps for _, steps, _ in asked.shapes), 1)
        setting = Setting("", deepest, temperature, 1.0, asked.chance)
        roots = tokens[:, prompt]
        texts = Texts(self.target, self.draft, self.prompts, asked.tokens, setting, 0, roots)
        for place in places:
            for columns, shape in zip(found, asked.shapes, strict=True):
                for rules, factor in itertools.product(together, asked.drawn_sharpness):
                    setting = Setting("", TreeShape(*shape), temperature, factor, asked.chance)
                    tried = texts.tried(setting, [RULES[rule] for rule in rules])
                    for rule, lengths in zip(rules, tried, strict=True):
                        column = columns.setdefault(f"{rule} {factor:g}", [[] for _ in lengths])
                        for text, length in zip(column, lengths, strict=True):
                            text.append(length)
            first = prompt + place + 1
            texts.advance(tokens[:, first : first + places.step])

    def contexts(self, temperature: float) -> tuple[list[list[Context]], torch.Tensor]:
        """Nodes that steps of chains of 7 reach, by depth, and the ids of the draft's tokens."""
        chance = self.asked.chance
        setting = Setting("coupling", TreeShape(1, 7, 7), temperature, 1.0, chance)
        texts = Texts(self.target, self.draft, self.prompts, self.asked.tokens, setting, seed=1)
        found: list[list[Context]] = [[] for _ in range(7)]
        wanted = self.asked.contexts
        for _ in range(self.asked.tokens // 8):
            texts.step()
            for context in texts.contexts:
                if len(found[context.depth]) < wanted:
                    kept = Context(context.depth, context.target.clone(), context.draft.clone())
                    found[context.depth].append(kept)
        return found, texts.ids


def tree_table(study: Study) -> None:
    """Print tokens per step by temperature, shape and rule, and what exceeds the first rule."""
    asked, names = study.asked, []
    rows, gains = [], []
    for temperature in asked.temperature:
        for shape, columns in zip(asked.shapes, study.compared(temperature), strict=True):
            names, (base, *others) = [*columns], columns.values()
            first = [f"{temperature:g}", ",".join(map(str, shape))]
            rows.append([*first, *(cell(mean(each)) for each in (base, *others))])
            gains.append([*first, *(per_cent(gain(each, base)) for each in others)])
    heads = ["temperature", "topk, steps, nodes"]
    print(markdown.table([*heads, *names], rows))
    if names[1:]:
        print(f"\nPer cent over {names[0]}:\n")
        print(markdown.table([*heads, *names[1:]], gains))
    print()


def node_table(study: Study) -> None:
    """Print chances of acceptance at one node, by temperature, depth and sharpness."""
    asked, rows = study.asked, []
    numbers: list[int] = asked.children
    for temperature, factor in itertools.product(asked.temperature, asked.node_sharpness):
        torch.manual_seed(0)
        by_depth, ids = study.contexts(temperature)
        for name, depths in (("1", slice(0, 1)), ("2", slice(1, 2)), ("3 to 7", slice(2, 7))):
            nodes = [node for depth in by_depth[depths] for node in depth]
            if not nodes:
                continue
            found = [
                hits(node.target, node.draft, ids, numbers, asked.draws, factor) for node in nodes
            ]
            columns = {
                field: torch.stack([getattr(each, field) for each in found])
                for field in Hits._fields
            }
            columns["bound - coupled"] = columns["bound"] - columns["coupled"]
            for field, values in columns.items():
                errors = (values.std(0) / len(values) ** 0.5).tolist()
                cells = [cell(pair) for pair in zip(values.mean(0).tolist(), errors, strict=True)]
                rows.append([f"{temperature:g}", f"{factor:g}", name, field, *cells])
    heads = ["temperature", "sharpness", "depth", "rule", *(f"K = {number}" for number in numbers)]
    print(markdown.table(heads, rows))


def read_chance(text: str) -> Chance:
    """Read ``scale,power``."""
    scale, power = (float(number) for number in text.split(","))
    return Chance(scale, power)


def run(arguments: argparse.Namespace) -> None:
    """Print the tables."""
    study = Study(arguments)
    if arguments.shapes:
        tree_table(study)
    if arguments.children:
        node_table(study)


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pair", type=Path)
    parser.add_argument("--shapes", nargs="*", type=read_shape, default=[(1, 3, 3), (4, 4, 6)])
    parser.add_argument("--rules", nargs="*", choices=RULES, default=["rejection", "block"])
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.6, 1.0])
    parser.add_argument(
        "--sharpness", nargs="*", type=float, default=[SHARPNESS], help="of coupled trees"
    )
    parser.add_argument(
        "--drawn-sharpness", nargs="+", type=float, default=[1.0], help="of drafts that are drawn"
    )
    parser.add_argument(
        "--chance",
        type=read_chance,
        default=read_chance("0.8,0.2"),
        metavar="SCALE,POWER",
        help="guess of acceptance that shapes drawn trees: SCALE * q ** POWER",
    )
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=160, help="tokens behind it")
    parser.add_argument("--stride", type=int, default=2, help="tokens from place to place")
    parser.add_argument("--children", nargs="*", type=int, default=[1, 2, 4, 8], metavar="K")
    parser.add_argument(
        "--node-sharpness", nargs="+", type=float, default=[1.0], help="for the last table"
    )
    parser.add_argument("--contexts", type=int, default=150, help="nodes of a depth")
    parser.add_argument("--draws", type=int, default=128, help="sets of children per node")
    arguments = parser.parse_args(given)
    with torch.inference_mode():
        return report.exit_status("acceptance_rules", functools.partial(run, arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
