import inspect

import pytest

from vllm_graft.spec_decode.trees.tree import TreeShape
from vllm_graft.spec_decode.tuning.shapes import dynamic, for_blocks, whole
from vllm_graft.testing import DrafterContract, TreePolicyContract
from vllm_graft.testing.contracts.tree_contracts import DraftTree

GOOD = DraftTree(tokens=[5, 6, 5, 7], parents=[0, 0, 1, 3], scores=[-0.1, -0.5, -0.5, -2.0])


class TestDynamic(TreePolicyContract):
    @pytest.fixture
    def policy(self):
        return dynamic


class TestWhole(TreePolicyContract):
    @pytest.fixture
    def policy(self):
        return whole


class TestForBlocks(TreePolicyContract):
    @pytest.fixture
    def policy(self):
        return for_blocks


class TestGoodTree(DrafterContract):
    @pytest.fixture
    def trees(self):
        return [GOOD, DraftTree([], [], [])]

    @pytest.fixture
    def vocab_size(self):
        return 8


@pytest.mark.parametrize(
    ("check", "tree"),
    [
        ("test_tokens_are_those_of_the_target", GOOD._replace(tokens=[5, 6, 5, 8])),
        ("test_tree_is_not_too_large", GOOD._replace(scores=[0.0])),
        ("test_tree_is_not_too_large", DraftTree([0] * 64, [0] * 64, [0.0] * 64)),
        ("test_parents_come_first", GOOD._replace(parents=[0, 0, 4, 3])),
        ("test_best_nodes_come_first", GOOD._replace(scores=[-0.5, -0.1, -0.5, -2.0])),
        ("test_siblings_differ", GOOD._replace(tokens=[5, 5, 5, 7])),
    ],
)
def test_bad_tree_is_caught(check, tree):
    function = getattr(DrafterContract(), check)
    wanted = {"trees": [tree], "vocab_size": 8}
    used = {name: wanted[name] for name in inspect.signature(function).parameters}
    with pytest.raises(AssertionError):
        function(**used)


@pytest.mark.parametrize(
    "shape", [TreeShape(8, 6, 32), TreeShape(8, 6, 30), TreeShape(0, 6, 31), TreeShape(8, 0, 31)]
)
def test_bad_policy_is_caught(shape):
    with pytest.raises(AssertionError):
        TreePolicyContract().test_shape_is_within_its_bounds(lambda *_: shape, None, 31)
