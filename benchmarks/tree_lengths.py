"""Compute acceptance lengths of trees of any shape, on a small pair in float32, without an engine.

    python -m benchmarks.tree_lengths tests/pair --shapes 4,7,7 8,7,63 --sharpness 1 1.12

PAIR holds `target/` (a Llama), `eagle3/` and `prompts.json`, as `tests/pair` does. The target
writes one text per prompt, with Gumbel noise that is known, as vLLM's is. From every place of a
text the head grows a tree (EAGLE-2, arXiv:2406.16858) as `spec_decode` does: it is coupled with the
noise, the best `topk` of a level go on, and the best `nodes` of all are kept. The nodes that agree
with the text that follows are accepted, and the next tree grows after them. So a shape or a score
can be judged in seconds, before there is a kernel for it, and without a GPU. A shape is topk, steps
and nodes. `--weights as-loaded fp8 int4:128` also tells what a draft in fewer bits gets accepted.

    python -m benchmarks.tree_lengths tests/pair --join --prompt 4096 --context 4352 --texts 8 \\
        --windows 0 256 1024 --shapes 8,6,31

tells what a window of the draft does (`graft.tree.draft_window`) in texts that are made of many.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.coarse_weights import FORMATS, coarse, read_format
from benchmarks.pair_models import Head, Llama, outside, read_weights, write
from vllm_graft.base import markdown
from vllm_graft.bench.common import report
from vllm_graft.spec_decode.heads.head import SHARPNESS
from vllm_graft.spec_decode.trees.shape import num_candidates

BEYOND = -1
"""The token after a text's end, which no tree holds."""


@dataclass(frozen=True)
class Candidates:
    """Candidates of trees from several places of a text: scores, and whether the text has them."""

    scores: Tensor
    right: Tensor

    def lengths(self, nodes: int) -> list[int]:
        """Tokens that a tree of the best `nodes` yields at each place, with the bonus token."""
        # A sure child has its parent's very score. As in the engine, the earlier one is better.
        kept = self.scores.sort(dim=1, descending=True, stable=True).indices[:, :nodes]
        # Right candidates are one path from the root, and parents are kept before their children.
        return [1 + int(count) for count in self.right.gather(1, kept).sum(1)]


def grow(
    head: Head, starts: Tensor, topk: int, steps: int, temperature: float, sharpness: float
) -> Candidates:
    """Grow trees whose root is the token at each of `starts` + 1."""
    trees, count = len(starts), len(head.places)
    truth = F.pad(head.text.tokens, (0, steps + 1), value=BEYOND)
    score, tokens = head.best(head.logits[starts], starts, topk, temperature, sharpness)
    right = tokens == truth[starts + 2][:, None]
    scores, rights = [score], [right]
    states = head.states[starts][:, None].expand(-1, topk, -1)
    keys = values = torch.zeros(trees, 0, head.sizes.head)
    ancestors = torch.zeros(trees, topk, 0, dtype=torch.bool)
    ends = starts[:, None] + 1
    later = (head.places >= ends) | outside(head.places, ends, head.window)
    later = later[:, None, None]
    for level in range(1, steps):
        places = (starts + level)[:, None].expand(-1, topk)
        own = torch.eye(topk, dtype=torch.bool).expand(trees, -1, -1)
        ancestors = torch.cat((ancestors, own), 2)
        others = ~ancestors[:, :, None]

        def attend(q: Tensor, k: Tensor, v: Tensor, others: Tensor = others) -> Tensor:
            nonlocal keys, values
            keys, values = torch.cat((keys, k), 1), torch.cat((values, v), 1)
            before = head.sizes.logits(q, head.k).masked_fill(later, -math.inf)
            within = head.sizes.logits(q, keys[:, None])
            within = within.masked_fill(others, -math.inf)
            weights = torch.cat((before, within), -1).softmax(-1)
            return weights[..., :count] @ head.v + weights[..., count:] @ values[:, None]

        states, logits = head.run(tokens, states, places, attend)
        gained, children = head.best(logits, places, topk, temperature, sharpness)
        wide = (score[..., None] + gained).flatten(1)
        hit = right[..., None] & (children == truth[starts + level + 2][:, None, None])
        scores.append(wide)
        rights.append(hit.flatten(1))
        score, picked = wide.topk(topk, 1)
        tokens, right = children.flatten(1).gather(1, picked), hit.flatten(1).gather(1, picked)
        parents = (picked // topk)[..., None]
        states = states.gather(1, parents.expand_as(states))
        ancestors = ancestors.gather(1, parents.expand_as(ancestors))
    return Candidates(torch.cat(scores, 1), torch.cat(rights, 1))


def mean_length(*texts: Sequence[int]) -> float:
    """Return the mean tokens per tree, where each tree grows from where the one before ended."""
    tokens = trees = 0
    for lengths in texts:
        place = 0
        while place < len(lengths):
            place, trees = place + lengths[place], trees + 1
        tokens += place
    return tokens / trees


def measure(
    head: Head, shapes: Sequence[tuple[int, int, int]], temperature: float, sharpness: float
) -> list[list[int]]:
    """Return, for each shape, the lengths at all places of the text but the last few."""
    deepest = max(steps for _, steps, _ in shapes)
    starts = torch.arange(head.text.prompt - 1, len(head.text.tokens) - deepest - 2)
    grown = {
        shape: grow(head, starts, *shape, temperature, sharpness)
        for shape in {shape[:2] for shape in shapes}
    }
    return [grown[shape[:2]].lengths(shape[2]) for shape in shapes]


def read_shape(text: str) -> tuple[int, int, int]:
    """Read ``topk,steps,nodes``."""
    topk, steps, nodes = (int(number) for number in text.split(","))
    if not 1 <= nodes <= num_candidates(topk, steps):
        raise argparse.ArgumentTypeError(f"{text}: no such tree has {nodes} nodes")
    return topk, steps, nodes


def read_prompts(pair: Path, count: int, tokens: int, *, join: bool = False) -> Tensor:
    """Read the first `tokens` tokens of at most `count` prompts that have so many.

    With `join` they are the last tokens of each prompt with others before it.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(pair / "target" / "tokenizer.json"))
    texts = json.loads((pair / "prompts.json").read_text())
    read = [tokenizer.encode(text).ids for text in texts]
    if join:
        turned = (read[at + 1 :] + read[: at + 1] for at in range(len(read)))
        read = [list(itertools.chain.from_iterable(each))[-tokens:] for each in turned]
    found = [ids[:tokens] for ids in read if len(ids) >= tokens]
    if not found:
        raise report.BenchmarkError(f"--prompt {tokens}: no prompt of {pair} has as many tokens")
    return torch.tensor(found[:count])


def run(arguments: argparse.Namespace) -> None:
    """Print a row for each temperature, format of the draft's weights and sharpness."""
    pair: Path = arguments.pair
    stretch = max(1.0, arguments.context / arguments.trained)
    target, loaded = Llama(pair, stretch, arguments.trained), read_weights(pair / "eagle3")
    drafts = {name: coarse(loaded, rounding) for name, rounding in arguments.weights}
    prompts = read_prompts(pair, arguments.texts, arguments.prompt, join=arguments.join)
    rows = []
    for temperature in arguments.temperature:
        texts = write(target, prompts, arguments.tokens, temperature)
        for (name, draft), window in itertools.product(drafts.items(), arguments.windows):
            heads = [Head(draft, target, text, window) for text in texts]
            for sharpness in arguments.sharpness:
                columns = zip(
                    *(measure(head, arguments.shapes, temperature, sharpness) for head in heads),
                    strict=True,
                )
                means = (f"{mean_length(*column):.3f}" for column in columns)
                seen = [str(window or "all")] if arguments.windows != [0] else []
                rows.append([f"{temperature:g}", name, f"{sharpness:g}", *seen, *means])
    shapes = [",".join(map(str, shape)) for shape in arguments.shapes]
    seen = ["window"] if arguments.windows != [0] else []
    print(markdown.table(["temperature", "weights", "sharpness", *seen, *shapes], rows))


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pair", type=Path)
    parser.add_argument(
        "--shapes", nargs="+", type=read_shape, default=[(4, 7, 7), (4, 12, 31), (8, 7, 63)]
    )
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 0.6, 1.0])
    parser.add_argument("--sharpness", nargs="+", type=float, default=[1.0, SHARPNESS])
    parser.add_argument(
        "--weights",
        nargs="+",
        type=read_format,
        default=[read_format("as-loaded")],
        metavar="FORMAT",
        help=f"formats of the draft's weights: {FORMATS}",
    )
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=160, help="tokens behind it")
    parser.add_argument(
        "--windows", nargs="+", type=int, default=[0], help="of the draft, in tokens; 0 for all"
    )
    parser.add_argument("--join", action="store_true", help="put other prompts before each")
    parser.add_argument(
        "--context", type=int, default=0, help="stretch rotations (YaRN) to so many tokens"
    )
    parser.add_argument("--trained", type=int, default=1024, help="tokens of texts in training")
    arguments = parser.parse_args(given)
    with torch.inference_mode():
        return report.exit_status("tree_lengths.py", functools.partial(run, arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
