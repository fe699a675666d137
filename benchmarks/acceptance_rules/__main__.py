"""Compare how many drafts of sampled requests are accepted, by rules that are all exact.

    python -m benchmarks.acceptance_rules PAIR --shapes 1,3,3 1,5,5 4,4,6 8,4,14

PAIR holds `target/` (a Llama), `eagle3/` and `prompts.json`, as `tests/pair` does. Models run in
float32 without an engine, and all figures are of whole speculative steps, each from where the one
before ended. A shape is topk, steps and nodes.

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

from benchmarks.acceptance_rules.decoding import Context, Setting, Texts, lengths_of
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


def hops(lengths: Sequence[int]) -> list[int]:
    """The lengths at those places of a text where a tree grows."""
    found, place = [], 0
    while place < len(lengths):
        found.append(lengths[place])
        place += lengths[place]
    return found


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

    def coupled(self, temperature: float) -> list[list[Lengths]]:
        """Lengths of coupled trees, by sharpness and by shape."""
        shapes: list[tuple[int, int, int]] = self.asked.shapes
        found: list[list[list[list[int]]]] = [[[] for _ in shapes] for _ in self.asked.sharpness]
        for text in write(self.target, self.prompts, self.asked.tokens, temperature):
            head = Head(self.draft, self.target, text)
            for factor, columns in zip(self.asked.sharpness, found, strict=True):
                measured = measure(head, shapes, temperature, factor)
                for column, lengths in zip(columns, measured, strict=True):
                    column.append(hops(lengths))
        return [list(columns) for columns in found]

    def drawn(
        self, temperature: float, shape: tuple[int, int, int], rule: str, sharpness: float
    ) -> Lengths:
        """Lengths of trees that know nothing of the tokens they are about to draw."""
        setting = Setting(RULES[rule], TreeShape(*shape), temperature, sharpness, self.asked.chance)
        texts = Texts(self.target, self.draft, self.prompts, self.asked.tokens, setting)
        return lengths_of(texts, self.asked.tokens)

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
    asked = study.asked
    drawn = list(itertools.product(asked.rules, asked.drawn_sharpness))
    names = [f"coupled {factor:g}" for factor in asked.sharpness]
    names += [f"{rule} {factor:g}" for rule, factor in drawn]
    rows, gains = [], []
    for temperature in asked.temperature:
        coupled = study.coupled(temperature)
        for number, shape in enumerate(asked.shapes):
            found = [columns[number] for columns in coupled]
            found += [study.drawn(temperature, shape, rule, factor) for rule, factor in drawn]
            first = [f"{temperature:g}", ",".join(map(str, shape))]
            rows.append([*first, *(cell(mean(each)) for each in found)])
            gains.append([*first, *(per_cent(gain(each, found[0])) for each in found[1:])])
            print(*rows[-1], *gains[-1], file=sys.stderr, flush=True)
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
