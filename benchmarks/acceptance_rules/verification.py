"""Rules that decide which nodes of a drafted tree are accepted. All of them are exact.

Exact means that what is emitted has the target's distribution. A chain is a tree of one child per
node: there `recursive` is standard rejection sampling, and `traversal` is block verification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_graft.spec_decode.grammars.packed_drafts import DraftTree

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Tree:
    """A drafted tree, with what target and draft say at its nodes.

    The children of a node were drawn from the draft's distribution there, one after another, and
    none twice. Whether a node gets another child may depend on all that was drawn before, but not
    on that child.

    Attributes:
        parents: of each node; node 0 is the root, and parents come before children.
        tokens: of each node; the root's is not read.
        target: ``[nodes, vocab]``, the target's probabilities of the token after each node.
        draft: likewise, the draft's; rows of nodes without children are not read.
    """

    parents: list[int]
    tokens: list[int]
    target: Floats
    draft: Floats

    def children(self) -> list[list[int]]:
        """The children of each node, in the order in which they were drawn."""
        return DraftTree(self.tokens, self.parents).children

    def path(self, node: int) -> list[int]:
        """The nodes from the root's child to `node`."""
        return DraftTree(self.tokens, self.parents).path(node)


@dataclass(frozen=True)
class Verdict:
    """What a rule decided.

    Attributes:
        path: accepted nodes, the root's child first.
        bonus: the token that is emitted after them.
    """

    path: list[int]
    bonus: int


Rule = Callable[[Tree, np.random.Generator], Verdict]


def _drawn(chances: Floats, random: np.random.Generator) -> int:
    """Draw a token from chances that need not add up to 1."""
    sums = np.cumsum(chances)
    return int(np.searchsorted(sums, random.random() * sums[-1], side="right"))


def _without(chances: Floats, token: int) -> Floats:
    """The distribution of what is drawn next, where nothing is drawn twice."""
    left = chances.copy()
    left[token] = 0.0
    total = left.sum()
    return left / total if total > 0 else left


def recursive(tree: Tree, random: np.random.Generator) -> Verdict:
    """Recursive rejection without replacement (SpecInfer, arXiv:2305.09781; Sequoia, 2402.12374).

    From the root on, a node's children are tried in turn. After a rejection the rest of the
    target's distribution, beyond what the draft covers, is the target of the next child.
    """
    children, node = tree.children(), 0
    while True:
        target, draft = tree.target[node], tree.draft[node]
        for child in children[node]:
            token = tree.tokens[child]
            if random.random() * draft[token] < target[token]:
                node = child
                break
            target = np.maximum(target - draft, 0.0)
            target, draft = target / target.sum(), _without(draft, token)
        else:
            return Verdict(tree.path(node), _drawn(target, random))


def traversal(tree: Tree, random: np.random.Generator) -> Verdict:
    """Traversal verification (arXiv:2505.12398), for a chain block verification (2403.10444).

    From the leaves to the root, a node is accepted together with its whole path. So a likely token
    late in a path makes up for an unlikely one before it.
    """
    children = tree.children()

    def visit(node: int, rate: float) -> Verdict | None:
        target, draft = tree.target[node], tree.draft[node]
        for child in children[node]:
            token = tree.tokens[child]
            found = visit(child, min(1.0, rate * target[token] / draft[token]))
            if found is not None:
                return found
            rest = np.maximum(rate * target - draft, 0.0)
            total = float(rest.sum())
            rate = total / (total + 1.0 - rate) if total > 0 else 0.0
            target, draft = rest / total if total > 0 else target, _without(draft, token)
        if random.random() < rate:
            return Verdict(tree.path(node), _drawn(target, random))
        return None

    found = visit(0, 1.0)
    assert found is not None, "the root is accepted at rate 1"
    return found


RULES: dict[str, Rule] = {"recursive": recursive, "traversal": traversal}
