"""Tests that every implementation of a hook must pass; subclass one and add its fixtures.

::

    class TestWidePolicy(TreePolicyContract):
        @pytest.fixture
        def policy(self):
            return wide_policy
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from vllm_graft.spec_decode.trees.tree import MAX_NODES

if TYPE_CHECKING:
    from vllm_graft.spec_decode.config.tree_config import TreeConfig
    from vllm_graft.spec_decode.tuning.shapes import TreePolicy


class TreePolicyContract:
    """For entries of ``graft_tree_policies``. Give a fixture ``policy``; ``config`` may be kept."""

    @pytest.fixture
    def policy(self) -> TreePolicy:
        """The policy under test."""
        raise NotImplementedError("give a fixture `policy`")

    @pytest.fixture(
        params=[(1, 1), (1, 5), (8, 6), (32, 2)], ids=lambda p: f"topk{p[0]}-steps{p[1]}"
    )
    def config(self, request: pytest.FixtureRequest) -> TreeConfig:
        """A configuration of the user."""
        from vllm_graft.spec_decode.config.tree_config import TreeConfig

        topk, steps = request.param
        return TreeConfig(topk=topk, steps=steps)

    @pytest.mark.parametrize("num_nodes", [1, 2, 31, MAX_NODES])
    def test_shape_is_within_its_bounds(
        self, policy: TreePolicy, config: TreeConfig, num_nodes: int
    ) -> None:
        """A tree has levels, and as many nodes as the engine verifies."""
        shape = policy(config, num_nodes)
        assert shape.topk >= 1
        assert shape.steps >= 1
        assert shape.num_nodes == num_nodes

    def test_same_question_has_the_same_answer(
        self, policy: TreePolicy, config: TreeConfig
    ) -> None:
        """Each rank of tensor parallelism asks on its own, and the answers must agree."""
        assert policy(config, 31) == policy(config, 31)


class DraftTree(NamedTuple):
    """The draft of one request; each is ``[num_nodes]``."""

    tokens: Sequence[int]
    """Target tokens. The root, node 0, has none here: ``tokens[i]`` is that of node ``i + 1``."""
    parents: Sequence[int]
    scores: Sequence[float]
    """Cumulative log-probabilities."""


class DrafterContract:
    """For entries of ``graft_drafters``. Give fixtures ``trees`` and ``vocab_size``."""

    @pytest.fixture
    def trees(self) -> Sequence[DraftTree]:
        """Trees that the proposer drafted, for several requests and steps."""
        raise NotImplementedError("give a fixture `trees`")

    @pytest.fixture
    def vocab_size(self) -> int:
        """Number of tokens of the target."""
        raise NotImplementedError("give a fixture `vocab_size`")

    @pytest.fixture(autouse=True)
    def _drafted_something(self, request: Any) -> None:
        assert request.getfixturevalue("trees"), "no tree was drafted, so nothing was checked"

    def test_tokens_are_those_of_the_target(
        self, trees: Sequence[DraftTree], vocab_size: int
    ) -> None:
        assert all(0 <= token < vocab_size for tree in trees for token in tree.tokens)

    def test_tree_is_not_too_large(self, trees: Sequence[DraftTree]) -> None:
        """Ancestor masks have 64 bits, one of them for the root."""
        for tree in trees:
            assert len(tree.tokens) == len(tree.parents) == len(tree.scores) <= MAX_NODES

    def test_parents_come_first(self, trees: Sequence[DraftTree]) -> None:
        """So any prefix of the nodes is a tree: the scheduler may cut a draft short."""
        for tree in trees:
            assert all(0 <= parent <= place for place, parent in enumerate(tree.parents))

    def test_best_nodes_come_first(self, trees: Sequence[DraftTree]) -> None:
        """So any prefix is the best tree of its size."""
        for tree in trees:
            assert list(tree.scores) == sorted(tree.scores, reverse=True)

    def test_siblings_differ(self, trees: Sequence[DraftTree]) -> None:
        """Verification follows the one child whose token is the target's."""
        for tree in trees:
            edges = list(zip(tree.parents, tree.tokens, strict=True))
            assert len(set(edges)) == len(edges)
