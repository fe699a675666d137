"""Each rule emits the target's distribution, and accepts as much as is known."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.acceptance_rules.tests.made_up import DRAFT, TARGET, emitted, excess, trees
from benchmarks.acceptance_rules.verification import RULES, Tree, Verdict, recursive, traversal
from vllm_graft.spec_decode.trees.shape import TreeShape

REQUESTS, LENGTH = 5000, 3
SHAPES = [TreeShape(1, 3, 3), TreeShape(2, 3, 6), TreeShape(4, 2, 8)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_what_is_emitted_has_the_targets_distribution(rule: str, shape: TreeShape) -> None:
    counts, _ = emitted(RULES[rule], shape, REQUESTS, LENGTH)
    assert excess(counts, LENGTH) < 4


def careless(tree: Tree, random: np.random.Generator) -> Verdict:
    """`recursive`, but what a rejection has used up of the target is not left out."""
    children, node = tree.children(), 0
    while True:
        target, draft = tree.target[node], tree.draft[node]
        for child in children[node]:
            token = tree.tokens[child]
            if random.random() * draft[token] < target[token]:
                node = child
                break
        else:
            return Verdict(
                tree.path(node), int(random.choice(len(target), p=target / target.sum()))
            )


def pruned(tree: Tree, random: np.random.Generator) -> Verdict:
    """`recursive` on a tree whose unlikeliest node of the first level was left out afterwards."""
    first = tree.children()[0]
    worst = min(first, key=lambda node: tree.draft[0][tree.tokens[node]])
    kept = [node for node in range(len(tree.parents)) if worst not in (node, *tree.path(node))]
    number = {node: place for place, node in enumerate(kept)}
    left = Tree(
        [number[tree.parents[node]] for node in kept],
        [tree.tokens[node] for node in kept],
        tree.target[kept],
        tree.draft[kept],
    )
    return recursive(left, random)


@pytest.mark.parametrize("rule", [careless, pruned])
def test_wrong_rules_are_found(rule: object) -> None:
    assert callable(rule)
    counts, _ = emitted(rule, TreeShape(2, 3, 6), REQUESTS, LENGTH)
    assert excess(counts, LENGTH) > 10


def test_a_chain_of_one_accepts_what_target_and_draft_share() -> None:
    shared = float(np.minimum(TARGET[0, 0], DRAFT[0, 0]).sum())
    for rule in RULES.values():
        _, accepted = emitted(rule, TreeShape(1, 1, 1), REQUESTS, 1)
        assert accepted == pytest.approx(shared, abs=0.03)


def test_block_verification_of_two_tokens_has_its_papers_value() -> None:
    """Section 1 of arXiv:2403.10444: 10/9 tokens by single tokens, 11/9 by the block."""
    target, draft = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    random = np.random.default_rng(0)
    found = {recursive: 0, traversal: 0}
    for _ in range(8000):
        tokens = [0, *random.choice(2, size=2, p=draft).tolist()]
        tree = Tree([0, 0, 1], tokens, np.tile(target, (3, 1)), np.tile(draft, (3, 1)))
        for rule in found:
            found[rule] += len(rule(tree, random).path)
    assert found[recursive] / 8000 == pytest.approx(10 / 9, abs=0.04)
    assert found[traversal] / 8000 == pytest.approx(11 / 9, abs=0.04)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees_keep_to_their_shape(shape: TreeShape) -> None:
    _, grown = trees(shape, 50)
    for parents, tokens, depths in zip(
        grown.parents.tolist(), grown.tokens.tolist(), grown.depths.tolist(), strict=True
    ):
        nodes = list(zip(parents, tokens, strict=True))[1:]
        assert len(set(nodes)) == len(nodes) == shape.num_nodes
        assert all(parents[1:].count(node) <= shape.topk for node in range(len(parents)))
        assert max(depths) <= shape.steps
        assert all(depths[n] == depths[parents[n]] + 1 for n in range(1, len(depths)))
