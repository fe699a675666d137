"""Trees of block drafters, grown in plain Python from what their pass left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from vllm_graft.spec_decode.drafters.block.block_trees import BlockTrees, Edges
from vllm_graft.spec_decode.drafters.block.refined import Refined
from vllm_graft.spec_decode.heads.head import SHARPNESS, DraftHead


class Node(NamedTuple):
    """A candidate: its place in the order of growth, its score, and where it came from."""

    place: int
    score: float
    token: int
    parent: int
    kept: int


Score = Callable[[int, Node], tuple[torch.Tensor, list[int]]]
"""Logits of a level's tokens behind a node, and the target's ids of these tokens."""


@dataclass
class Seen:
    trees: int = 0
    branching: int = 0
    """Trees with a node that has two children."""
    depths: set[int] = field(default_factory=set)
    rows: dict[int, set[int]] = field(default_factory=dict)
    """Rows per request of the passes, by number of requests."""


def grow(score: Score, root: int, *, topk: int, steps: int, nodes: int) -> list[Node]:
    """Grow the best tree, a list of nodes best first."""
    found: list[Node] = []
    frontier = [Node(-1, 0.0, root, -1, 0)]
    for level in range(steps):
        children: list[Node] = []
        for node in frontier:
            logits, ids = score(level, node)
            logp = (logits.float() * SHARPNESS).log_softmax(-1)
            best = logp.topk(topk)
            for value, place in zip(best.values.tolist(), best.indices.tolist()):
                number = len(found) + len(children)
                new = Node(number, node.score + value, ids[place], node.place, place)
                children.append(new)
        found += children
        frontier = sorted(children, key=lambda node: (-node.score, node.place))[:topk]
    return sorted(found, key=lambda node: (-node.score, node.place))[:nodes]


def by_path(head: Any, states: torch.Tensor, logits: torch.Tensor) -> Score:
    """Score by a refiner, from the states of a block and the logits of its positions."""
    paths: dict[int, list[int]] = {}
    vocabulary = list(range(logits.shape[-1]))

    def score(level: int, node: Node) -> tuple[torch.Tensor, list[int]]:
        paths[node.place] = [*(paths[node.parent] if node.place >= 0 else []), node.token]
        return refined_logits(head, states, logits[level], paths[node.place]), vocabulary

    return score


@contextmanager
def compared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Compare each tree that is drafted inside with the reference; requests are to be greedy."""
    seen = Seen()
    stock, logits_of, run = BlockTrees.grow_and_choose, DraftHead.logits, BlockTrees._run_model
    dumped: list[torch.Tensor] = []
    passed: list[torch.Tensor] = []
    rows: list[int] = []

    def logits(head: DraftHead, *args: Any, **kwargs: Any) -> torch.Tensor:
        dumped[:] = [logits_of(head, *args, **kwargs)]
        return dumped[0]

    def run_model(draft: BlockTrees, num_tokens: int, *args: Any) -> torch.Tensor:
        states = run(draft, num_tokens, *args)
        rows.append(len(states))
        passed[:] = [states]
        return states

    def grow_and_choose(draft: BlockTrees, plan: Any, num_reqs: int, *args: Any) -> None:
        lattice = draft.lattice
        seen.rows.setdefault(num_reqs, set()).add(rows.pop() // num_reqs)
        stock(draft, plan, num_reqs, *args)
        for row, slot in enumerate(draft.idx_mapping[:num_reqs].tolist()):
            if slot >= 0:
                score = _score(draft, lattice, row, dumped, passed)
                root = int(draft.input_buffers.input_ids[row * draft.num_query_per_req])
                compare(draft, plan.shape, row, slot, score, root, seen)

    with monkeypatch.context() as patch:
        patch.setattr(DraftHead, "logits", logits)
        patch.setattr(BlockTrees, "_run_model", run_model)
        patch.setattr(BlockTrees, "grow_and_choose", grow_and_choose)
        yield seen


def _score(
    draft: Any, lattice: Any, row: int, dumped: list[torch.Tensor], passed: list[torch.Tensor]
) -> Score:
    vocabulary = list(range(draft.vocab_size))
    if isinstance(lattice, Refined):
        states = passed[0].unflatten(0, (-1, draft.num_query_per_req))[row]
        return by_path(draft.model.model.xpress_head, states, lattice._logits[row])
    if isinstance(lattice, Edges):
        ids, scores = lattice._ids[row], lattice._scores[row]
        return lambda level, node: (scores[level, node.kept if level else 0], ids[level].tolist())
    if hasattr(draft, "_draft_topk"):
        base, head = lattice._logits[row].clone(), draft.model.model.markov_head
        first, second = head.markov_w1.weight, head.markov_w2.weight
        return lambda level, node: (base[level] + second @ first[node.token], vocabulary)
    base = dumped[0].unflatten(0, (-1, draft.positions))[row]
    return lambda level, node: (base[level], vocabulary)


def compare(
    draft: Any, shape: Any, row: int, slot: int, score: Score, root: int, seen: Seen
) -> None:
    """Compare the tree that a drafter has made for a row of a batch with one that `grow` makes."""
    steps = min(shape.steps, shape.num_nodes)
    expected = grow(score, root, topk=shape.topk, steps=steps, nodes=shape.num_nodes)
    nodes = shape.num_nodes
    assert draft.draft_tokens[row, :nodes].tolist() == [node.token for node in expected]
    numbers = {-1: 0} | {node.place: number for number, node in enumerate(expected, start=1)}
    parents = [numbers[node.parent] for node in expected]
    assert draft.context.tree.parents[slot, 1 : nodes + 1].tolist() == parents
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    assert draft.context.tree.depths[slot, : nodes + 1].tolist() == depths
    seen.trees += 1
    seen.branching += len(set(parents)) < len(parents)
    seen.depths |= set(depths)


class RefinerHead(nn.Module):
    """Stands for vLLM's ``XPressRefinerHead``, with its names and none of its kernels."""

    def __init__(self, vocab: int, hidden: int, rows: int, rank: int, inner: int, topc: int = 0):
        super().__init__()
        self.rank, self.topc = rank, topc
        self.w1 = nn.Embedding(vocab, rank)
        self.down_h, self.down_g = (nn.Linear(hidden, rank, bias=False) for _ in range(2))
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_L = nn.Parameter(torch.zeros(rank, rows, rows))
        self.mlp_gate, self.mlp_up = (nn.Linear(rank, inner, bias=False) for _ in range(2))
        self.mlp_down = nn.Linear(inner, rank, bias=False)
        self.w2 = nn.Linear(rank, vocab, bias=False)

    def hidden_cache(self, blocks: torch.Tensor) -> torch.Tensor:
        """States and their mean, two numbers per channel and row."""
        mean = torch.stack([block.mean(0).expand_as(block) for block in blocks])
        return torch.cat([self.down_h(blocks), self.down_g(mean)], -1)

    def fold(self, raw: torch.Tensor) -> None:
        """Set the mix from the checkpoint's, to which each row's own place is added."""
        self.mix_L.data.copy_(raw.tril() + torch.eye(raw.shape[-1]))


def refined_logits(
    head: Any, states: torch.Tensor, base: torch.Tensor, path: list[int]
) -> torch.Tensor:
    """Logits behind a path.

    Args:
        head: the refiner.
        states: ``[rows, hidden]``, the states of a whole block.
        base: ``[vocabulary]``, the logits of the position behind the path, without a bias.
        path: the last token and the drafts behind it.

    Returns:
        ``[vocabulary]``, -inf for tokens that are no candidates.
    """
    place, rank = len(path), head.rank
    whole = states.mean(0)
    projection = head.in_proj.weight
    mixed = torch.zeros(rank)
    for row in range(place + 1):
        before = path[max(row - 1, 0)]
        parts = [
            head.down_h.weight @ states[row],
            head.down_g.weight @ whole,
            head.w1.weight[before],
        ]
        mixed += head.mix_L[:, place, row] * (projection @ torch.cat(parts))
    gate = head.mlp_gate.weight @ mixed
    inner = gate * torch.sigmoid(gate) * (head.mlp_up.weight @ mixed)
    logits = base + head.w2.weight @ (mixed + head.mlp_down.weight @ inner)
    if head.topc and head.topc < len(base):
        left_out = base < base.topk(head.topc).values[-1]
        logits = logits.masked_fill(left_out, float("-inf"))
    return logits
