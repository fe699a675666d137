"""Plans of blocks."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graft.base.errors import HookError
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.drafters.block import block_trees
from vllm_graft.spec_decode.drafters.block.block_trees import BlockTrees
from vllm_graft.spec_decode.drafters.block.dflash2 import DFlash2Trees
from vllm_graft.spec_decode.drafters.draft_trees import DraftTrees, TreePlan
from vllm_graft.spec_decode.trees.tree import TreeShape
from vllm_graft.spec_decode.tuning.scheduling import _levels

GROWTH: Any = None


def drafter(kind: type[BlockTrees] = BlockTrees, **config: Any) -> Any:
    """A drafter of up to 15 nodes that was not built."""
    made = kind.__new__(kind)
    speculative = SimpleNamespace(num_speculative_tokens=15)
    engine: Any = SimpleNamespace(speculative_config=speculative)
    made.trees = DraftTrees(TreeConfig(**{"topk": 4, "steps": 6, **config}), engine)
    made.sample_from_anchor = False
    return made


def plan(topk: int, steps: int, nodes: int) -> TreePlan:
    return TreePlan(TreeShape(topk, steps, nodes), [1, 2], GROWTH)


@pytest.mark.parametrize(
    ("shape", "why"),
    [(TreeShape(4, 7, 12), "topk 4 and steps 7 for 12 nodes"), (TreeShape(5, 3, 12), "topk 5")],
)
def test_a_policy_beyond_the_block_is_refused(
    monkeypatch: pytest.MonkeyPatch, shape: TreeShape, why: str
) -> None:
    monkeypatch.setattr(block_trees, "plan_shapes", lambda *_: {shape: [1]})
    with pytest.raises(
        HookError, match=f"graft.tree.policy 'whole' wants {why}.*topk 4 and st.* 6"
    ):
        drafter(policy="whole").plan_batches()
    # Five nodes have no more than five levels, whatever `auto` allows them.
    fitting = {TreeShape(4, 6, 12): [1], TreeShape(4, 7, 5): [2]}
    monkeypatch.setattr(block_trees, "plan_shapes", lambda *_: fitting)
    assert drafter(policy="whole").plan_batches() is fitting


def test_a_block_is_as_long_as_its_trees_are_deep() -> None:
    draft = drafter()
    assert (draft.positions_of(plan(4, 6, 15)), draft.rows_of(plan(4, 6, 15))) == (6, 7)
    assert (draft.positions_of(plan(2, 3, 3)), draft.rows_of(plan(2, 3, 3))) == (3, 4)
    # A tree of two nodes has no third level.
    assert draft.positions_of(plan(2, 5, 2)) == 2
    draft.sample_from_anchor = True
    assert draft.rows_of(plan(2, 3, 3)) == 3
    assert drafter(DFlash2Trees).positions_of(plan(2, 3, 3)) == 6


def test_a_step_has_its_own_block_and_vllm_s_is_put_back() -> None:
    draft, few, graphs = drafter(), plan(2, 3, 3), SimpleNamespace()
    draft.trees.plans = {3: few, 15: plan(4, 6, 15)}
    draft.num_speculative_steps, draft.num_query_per_req = 6, 7
    draft.query_cudagraph_manager, draft.max_num_tokens = None, 100
    draft.block_3_cudagraph_manager = graphs
    with draft.drafting(few):
        assert (draft.num_speculative_steps, draft.num_query_per_req) == (3, 4)
        assert draft.query_cudagraph_manager is graphs
        assert (draft.plan, draft.positions, draft.topk) == (few, 3, 2)
        # The rows that three requests verify, and no more than a batch may have.
        assert draft._num_graph_context_tokens(3) == 12
        assert draft._num_graph_context_tokens(40) == 100
    assert (draft.num_speculative_steps, draft.num_query_per_req) == (6, 7)
    assert draft.query_cudagraph_manager is None
    assert draft.plan is draft.trees.plans[15]
    assert draft._num_graph_context_tokens(3) == 48


def test_the_tuner_is_told_the_levels_of_blocks() -> None:
    """EAGLE's trees of 30 nodes have 5 levels, and a block drafter's have all."""
    draft = SimpleNamespace(architectures=["Qwen3DSparkModel"])
    config: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(method="dspark", draft_model_config=draft)
    )
    tree = TreeConfig(shape="auto", steps=7)
    assert _levels(tree, config, {3, 14, 30}) == {3: 3, 14: 4, 30: 7}
    assert _levels(TreeConfig(shape="auto", steps=7, policy="whole"), config, {14}) == {14: 7}
    config.speculative_config.method = "eagle3"
    assert _levels(tree, config, {3, 14, 30}) == {3: 3, 14: 4, 30: 5}
