"""Blocks that are refined, and plans of blocks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.references.block_reference import (
    Node,
    RefinerHead,
    by_path,
    grow,
    refined_logits,
)
from vllm_graft.base.errors import HookError
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.drafters.block import block_trees
from vllm_graft.spec_decode.drafters.block.block_trees import BlockGrowth, BlockTrees
from vllm_graft.spec_decode.drafters.block.dflash2 import DFlash2Trees
from vllm_graft.spec_decode.drafters.block.refined import Refined, Refiner
from vllm_graft.spec_decode.drafters.draft_trees import DraftTrees, TreePlan
from vllm_graft.spec_decode.trees.tree import TreeShape
from vllm_graft.spec_decode.tuning.scheduling import _levels

VOCAB, HIDDEN, ROWS, RANK, REQS = 23, 10, 7, 6, 3
DEPTH = ROWS - 1


class Block:
    """A random block of each of three requests."""

    def __init__(self, topc: int = 0, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.head = RefinerHead(VOCAB, HIDDEN, ROWS, RANK, 8, topc).requires_grad_(False)
        for weight in self.head.parameters():
            torch.nn.init.normal_(weight, std=0.7)
        self.head.fold(torch.randn(RANK, ROWS, ROWS) * 0.7)
        self.states = torch.randn(REQS, ROWS, HIDDEN)
        self.logits = torch.randn(REQS, DEPTH, VOCAB) * 2
        self.roots = torch.randint(0, VOCAB, (REQS,), dtype=torch.int32)

    def lattice(self, topk: int, noise: Any = lambda level, nodes: None) -> Refined:
        refiner = Refiner(self.head, self.states)
        return Refined(refiner, self.logits, self.roots, topk, noise)

    def behind(self, row: int, path: list[int]) -> torch.Tensor:
        base = self.logits[row, len(path) - 1]
        return refined_logits(self.head, self.states[row], base, path)

    def expected(self, row: int, shape: TreeShape) -> list[Node]:
        """The tree of a request, node by node."""
        score = by_path(self.head, self.states[row], self.logits[row])
        root = int(self.roots[row])
        return grow(score, root, topk=shape.topk, steps=shape.steps, nodes=shape.num_nodes)


def drafted(block: Block, shape: TreeShape, noise: Any = lambda level, nodes: None) -> Any:
    """The table of candidates that the product grows."""
    growth = BlockGrowth(shape, REQS + 1, torch.device("cpu"))
    drafter = SimpleNamespace(lattice=block.lattice(shape.topk, noise))
    growth.grow(drafter, REQS, None, num_nodes=shape.num_nodes)
    return growth.candidates


def best(table: Any, row: int, count: int) -> list[tuple[int, int, int]]:
    """Place, token and parent of the best candidates."""
    order = sorted(range(table.scores.shape[1]), key=lambda i: (-float(table.scores[row, i]), i))
    return [(i, int(table.tokens[row, i]), int(table.parents[row, i])) for i in order[:count]]


@pytest.mark.parametrize("topc", [0, 7])
def test_every_node_is_scored_behind_its_own_path(topc: int) -> None:
    block, shape = Block(topc), TreeShape(topk=4, steps=DEPTH, num_nodes=40)
    table = drafted(block, shape)
    for row in range(REQS):
        nodes = block.expected(row, shape)
        wanted = [(node.place, node.token, node.parent) for node in nodes]
        assert best(table, row, 40) == wanted
        scores = table.scores[row, [node.place for node in nodes]]
        expected = torch.tensor([node.score for node in nodes])
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-3)
        # The tree branches below its first level, or paths would not matter.
        parents = [node.parent for node in nodes if node.parent >= 0]
        assert len(set(parents)) < len(parents)


@pytest.mark.parametrize("spoiled", ["parents", "place", "root"])
def test_wrong_paths_are_seen(monkeypatch: pytest.MonkeyPatch, spoiled: str) -> None:
    """Negative controls: another node's path, another place of the block, another last token."""
    block, shape = Block(), TreeShape(topk=4, steps=DEPTH, num_nodes=40)
    row_of = Refiner.row
    if spoiled == "parents":
        stock = torch.Tensor.gather
        monkeypatch.setattr(torch.Tensor, "gather", lambda t, dim, i: stock(t, dim, i.flip(1)))
    elif spoiled == "place":
        monkeypatch.setattr(Refiner, "row", lambda r, place, t: row_of(r, max(place - 1, 0), t))
    else:
        monkeypatch.setattr(
            Refiner, "row", lambda r, place, t: row_of(r, place, t if place else t * 0)
        )
    table = drafted(block, shape)
    wanted = [block.expected(row, shape) for row in range(REQS)]
    same = [
        best(table, row, 40) == [(node.place, node.token, node.parent) for node in wanted[row]]
        for row in range(REQS)
    ]
    assert not all(same)


def refined(block: Block, row: int, passes: int) -> list[int]:
    """What a chain drafts that refines all positions at once, so many times."""
    drafts = block.logits[row].argmax(-1).tolist()
    for _ in range(passes):
        path = [int(block.roots[row]), *drafts]
        drafts = [int(block.behind(row, path[: level + 1]).argmax()) for level in range(DEPTH)]
    return drafts


@pytest.mark.parametrize("topc", [0, 7])
def test_a_chain_is_where_refining_a_whole_block_ends(topc: int) -> None:
    block, shape = Block(topc, seed=2), TreeShape(topk=1, steps=DEPTH, num_nodes=DEPTH)
    table = drafted(block, shape)
    chains = [table.tokens[row, :DEPTH].tolist() for row in range(REQS)]
    assert chains == [refined(block, row, DEPTH) for row in range(REQS)]
    # Fewer passes leave its end as it was.
    assert chains != [refined(block, row, 1) for row in range(REQS)]


def test_noise_is_asked_for_each_level() -> None:
    asked = []

    def noise(level: int, nodes: int) -> None:
        asked.append((level, nodes))

    drafted(Block(), TreeShape(topk=2, steps=3, num_nodes=9), noise)
    assert asked == [(0, 1), (1, 2), (2, 2)]


def test_a_shorter_block_has_the_same_refiner() -> None:
    """An engine of fewer nodes than a block has positions asks for a shorter one."""
    block = Block()
    block.states, block.logits = block.states[:, :4], block.logits[:, :3]
    shape = TreeShape(topk=3, steps=3, num_nodes=12)
    table = drafted(block, shape)
    for row in range(REQS):
        nodes = block.expected(row, shape)
        assert best(table, row, 12) == [(node.place, node.token, node.parent) for node in nodes]


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


def test_a_refined_block_is_whole() -> None:
    """Whatever the depth of its trees, but no longer than vLLM has slots for."""
    draft = drafter()
    speculative = draft.trees.engine_config.speculative_config
    hf_config = SimpleNamespace(xpress_block_size=9, block_size=4)
    speculative.draft_model_config = SimpleNamespace(hf_config=hf_config)
    assert draft.depth == 6
    speculative.draft_model_config.architectures = ["Qwen3XPressModel"]
    assert draft.depth == 8
    speculative.num_speculative_tokens = 5
    assert draft.depth == 5


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
