"""The draft's levels with a small stand-in draft, compared with EAGLE-2 written out."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.references.tree_reference import Node, eagle2_tree
from vllm_graft.base.errors import HookError
from vllm_graft.spec_decode.drafters import levels as module
from vllm_graft.spec_decode.drafters.draft_trees import Sources, TreePlan
from vllm_graft.spec_decode.drafters.levels import LevelGrowth, LevelMemory
from vllm_graft.spec_decode.drafters.target_dependent import TargetDependentTrees
from vllm_graft.spec_decode.drafters.tree_drafting import TreeDrafting
from vllm_graft.spec_decode.trees.tree import TreeShape, TreeState, num_candidates

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, HIDDEN, MAX_REQS, MAX_LEN = 19, 6, 4, 64
SHAPE = TreeShape(topk=3, steps=4, num_nodes=9)

generator = torch.Generator().manual_seed(0)
EMBED, MIX, HEAD = (
    torch.randn(rows, HIDDEN, generator=generator) for rows in (VOCAB, HIDDEN, VOCAB)
)


def step(tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return the next states, [rows, hidden], from the tokens and their parents' states alone."""
    return torch.tanh(EMBED.to(hidden.device)[tokens] + hidden @ MIX.to(hidden.device))


def top(
    hidden: torch.Tensor, topk: int = SHAPE.topk, noise: Any = None, *, narrow: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    assert not narrow
    return (hidden @ HEAD.to(hidden.device).t()).log_softmax(-1).topk(topk)  # type: ignore[return-value]


class FakeDraft(SimpleNamespace):
    """Stands for a drafter after its first pass; it runs its model as the product does."""

    run_frontier = TargetDependentTrees.run_frontier
    last_positions = TargetDependentTrees.last_positions
    last_states = TargetDependentTrees.last_states

    def __init__(self, num_reqs: int) -> None:
        states = torch.randn(MAX_REQS, HIDDEN, generator=torch.Generator().manual_seed(5))
        super().__init__(
            hidden_states=states.to(DEVICE),
            input_buffers=SimpleNamespace(positions=torch.tensor([10, 20, 61, 40], device=DEVICE)),
            idx_mapping=torch.tensor([2, 0, 3, 1][:num_reqs] + [-1] * 4, device=DEVICE),
            max_model_len=MAX_LEN,
            head=SimpleNamespace(top=top),
            supports_mm_inputs=False,
            vllm_config=None,
            draft_tokens=torch.full((MAX_REQS, SHAPE.num_nodes), -7, device=DEVICE),
            context=SimpleNamespace(tree=TreeState.allocate(MAX_REQS, SHAPE.num_nodes, DEVICE)),
            passes=[],
            trees=SimpleNamespace(sources=Sources()),
        )
        self.context.tree.parents.fill_(-7)

    def draft_first_level(
        self, num_reqs: int, *, narrow: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert not narrow
        return top(self.hidden_states[:num_reqs])

    def noise(self, num_reqs: int, positions: Any, *, rows: int, offset: int) -> None:
        assert positions.shape == (num_reqs * rows,)
        assert offset == 1

    def _prepare_eplb_forward(self, rows: int) -> None: ...

    def model(
        self, *, input_ids: Any, positions: Any, hidden_states: Any, inputs_embeds: Any
    ) -> Any:
        assert inputs_embeds is None
        assert input_ids.dtype == torch.int32
        assert positions.is_contiguous()
        assert hidden_states.is_contiguous()
        self.passes.append(positions.tolist())
        output = step(input_ids, hidden_states)
        # The states stay in the buffer that they came from, as with fused norms.
        return hidden_states.copy_(output)


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the forward contexts that are set."""
    entered: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def set_forward_context(metadata: Any, config: Any, **options: Any) -> Any:
        entered.append({"metadata": metadata, **options})
        yield

    monkeypatch.setattr(module, "set_forward_context", set_forward_context)
    return entered


def make_levels(extra: int = 0) -> LevelGrowth:
    return in_one_memory(SHAPE, extra=extra)[0]


def in_one_memory(*shapes: TreeShape, extra: int = 0) -> list[LevelGrowth]:
    """Make levels of each shape, in the same memory."""
    layers: Any = {"draft.0": SimpleNamespace(num_kv_heads=2, head_size=8)}
    memory = LevelMemory(
        shapes,
        layers,
        max_reqs=MAX_REQS,
        dtype=torch.float32,
        device=torch.device(DEVICE),
        extra=extra,
    )
    return [LevelGrowth(shape, memory, torch.int32) for shape in shapes]


def grow(levels: LevelGrowth, draft: Any, num_reqs: int, nodes: int = SHAPE.num_nodes) -> None:
    """Draft the trees of `num_reqs` requests, padding included."""
    plan = TreePlan(replace(SHAPE, num_nodes=nodes), (), levels)
    TreeDrafting.grow_and_choose(draft, plan, num_reqs, None)


def written_out(state: torch.Tensor) -> tuple[list[Node], list[int]]:
    """Grow the tree of one request, level by level, and return it with its tokens."""
    logp, tokens = top(state[None])
    scores = [logp[0]]
    # A frontier entry is a token, the state that it continues from, and its score.
    frontier = [(int(t), state, float(p)) for t, p in zip(tokens[0], logp[0])]
    all_tokens = tokens[0].tolist()
    for _ in range(1, SHAPE.steps):
        children = []
        level = []
        for token, parent_state, score in frontier:
            own = step(torch.tensor([token]), parent_state[None])[0]
            logp, tokens = top(own[None])
            level.append(logp[0])
            all_tokens += tokens[0].tolist()
            children += [(int(t), own, score + float(p)) for t, p in zip(tokens[0], logp[0])]
        scores.append(torch.stack(level))
        frontier = sorted(children, key=lambda child: -child[2])[: SHAPE.topk]
    nodes = eagle2_tree(scores, SHAPE.num_nodes)
    return nodes, [all_tokens[node.candidate] for node in nodes]


def check(draft: Any, num_reqs: int) -> None:
    for row in range(num_reqs):
        nodes, tokens = written_out(draft.hidden_states[row].cpu())
        slot = int(draft.idx_mapping[row])
        assert draft.draft_tokens[row].tolist() == tokens
        assert draft.context.tree.parents[slot].tolist() == [-1, *(node.parent for node in nodes)]
        assert draft.context.tree.depths[slot].tolist() == [0, *(node.depth for node in nodes)]


@pytest.mark.parametrize("num_reqs", [1, 4])
def test_the_tree_is_eagle_2_s(contexts: list[dict[str, Any]], num_reqs: int) -> None:
    draft = FakeDraft(num_reqs)
    grow(make_levels(), draft, num_reqs)
    check(draft, num_reqs)
    assert len(contexts) == SHAPE.steps - 1
    assert all(context["slot_mapping"] == {} for context in contexts)


@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
def test_fewer_nodes_need_fewer_levels(contexts: list[dict[str, Any]], nodes: int) -> None:
    """The engine keeps the first nodes: they are the same ones, and deeper levels don't run."""
    whole, cut = FakeDraft(4), FakeDraft(4)
    grow(make_levels(), whole, 4)
    contexts.clear()
    grow(make_levels(), cut, 4, nodes)
    assert len(contexts) == min(nodes, SHAPE.steps) - 1
    assert torch.equal(cut.draft_tokens[:, :nodes], whole.draft_tokens[:, :nodes])
    for name in ("parents", "depths", "masks"):
        found, wanted = getattr(cut.context.tree, name), getattr(whole.context.tree, name)
        assert torch.equal(found[:, : nodes + 1], wanted[:, : nodes + 1])


def test_states_of_another_parent_are_noticed(
    contexts: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, levels = FakeDraft(4), make_levels()
    real = module.expand_frontier

    def unordered(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        levels.parents.copy_(levels.parents.roll(1))

    monkeypatch.setattr(module, "expand_frontier", unordered)
    grow(levels, draft, 4)
    with pytest.raises(AssertionError):
        check(draft, 4)


def test_padding_leaves_no_trace(contexts: list[dict[str, Any]]) -> None:
    draft = FakeDraft(2)
    grow(make_levels(), draft, 4)
    check(draft, 2)
    untouched = [slot for slot in range(MAX_REQS) if slot not in (2, 0)]
    assert (draft.context.tree.parents[untouched] == -7).all()
    assert contexts[0]["num_tokens"] == 4 * SHAPE.topk


def test_positions_go_down_with_the_levels_and_stay_in_the_model(
    contexts: list[dict[str, Any]],
) -> None:
    draft = FakeDraft(4)
    grow(make_levels(), draft, 4)
    for level, positions in enumerate(draft.passes, start=1):
        expected = [min(p + level, MAX_LEN - 1) for p in (10, 20, 61, 40)]
        assert positions == [p for p in expected for _ in range(SHAPE.topk)]


def test_levels_of_several_shapes_share_memory(contexts: list[dict[str, Any]]) -> None:
    ours, narrow, wide = in_one_memory(SHAPE, TreeShape(2, 7, 7), TreeShape(4, 2, 9))
    begins = {each.scratch["draft.0"].data_ptr() for each in (ours, narrow, wide)}
    assert len(begins) == 1
    assert narrow.scratch["draft.0"].shape == (MAX_REQS, 14, 2, 16)
    # Leftovers of another shape change nothing.
    for each in (narrow, wide):
        each.scratch["draft.0"].fill_(torch.nan)
    draft = FakeDraft(4)
    grow(ours, draft, 4)
    check(draft, 4)


class OneNode:
    """Another source, with a child of the root in the last of its columns."""

    def __init__(self, most: int, token: int, score: float) -> None:
        self.most, self.token, self.score = most, token, score
        self.firsts: list[int] = []

    def columns(self, num_nodes: int) -> int:
        return min(self.most, num_nodes)

    def add(self, table: Any, drafter: Any, num_reqs: int, levels: int, **given: int) -> None:
        columns = self.columns(given["num_nodes"])
        self.firsts.append(given["first"])
        last = given["first"] + columns - 1
        table.scores[:num_reqs, given["first"] : last] = float("-inf")
        table.scores[:num_reqs, last] = self.score
        table.tokens[:num_reqs, last] = self.token
        table.parents[:num_reqs, last] = -1


def test_other_sources_share_the_columns_behind_the_levels(contexts: list[dict[str, Any]]) -> None:
    draft = FakeDraft(2)
    sources = OneNode(3, 101, 0.0), OneNode(2, 102, -1e9), OneNode(9, 103, 1.0)
    draft.trees.sources = Sources(*sources)
    draft.context.extra_nodes = torch.full((MAX_REQS,), -7, device=DEVICE)
    grow(make_levels(extra=14), draft, 2, nodes=5)
    behind = num_candidates(SHAPE.topk, SHAPE.steps)
    assert [source.firsts for source in sources] == [[behind], [behind + 3], [behind + 5]]
    # The best two nodes are theirs, then come the draft's; the last source's node is too bad.
    assert (draft.draft_tokens[:2, :2] == torch.tensor([103, 101], device=DEVICE)).all()
    assert draft.context.extra_nodes.tolist() == [0b110, -7, 0b110, -7]
    alone = FakeDraft(2)
    grow(make_levels(), alone, 2)
    assert torch.equal(draft.draft_tokens[:2, 2:5], alone.draft_tokens[:2, :3])


def test_a_table_without_columns_for_ngrams_is_refused() -> None:
    sources = Sources(OneNode(3, 101, 0.0))
    sources.require_columns([make_levels(extra=3)], 5)
    with pytest.raises(HookError, match=r"3 more columns .* than LevelGrowth has: allocate it"):
        sources.require_columns([make_levels(extra=2)], 5)


def test_the_prefix_ends_before_rejected_rows() -> None:
    levels = make_levels()
    seq_lens = torch.tensor([20, 30, 40, 50], device=DEVICE).int()
    for rejected, expected in (
        ([3, 0], [17, 30, 0, 0]),
        ([0, 1, 2, 3], [20, 29, 38, 47]),
        # Prefixes of earlier requests are cleared.
        ([1, 1, 1], [19, 29, 39, 0]),
        ([5], [15, 0, 0, 0]),
        ([5, 6], [15, 24, 0, 0]),
    ):
        levels.set_prefix(seq_lens, torch.tensor(rejected, device=DEVICE).int())
        assert levels.prefix_lens.tolist() == expected


def test_metadata_of_the_levels() -> None:
    levels = make_levels()
    table = torch.arange(12, device=DEVICE).view(4, 3)
    group = SimpleNamespace(
        kv_cache_group_id=1,
        layer_names=["draft.0"],
        map_to_kernel_block_table=lambda block_table: block_table * 2,
    )
    draft: Any = SimpleNamespace(
        attn_groups=[[group]], block_tables=SimpleNamespace(input_block_tables=[None, table])
    )
    levels.map_block_tables(draft)
    metadata = levels.metadata(3, 50)
    assert [level["draft.0"].level for level in metadata] == [0, 1, 2]
    for level in metadata:
        one = level["draft.0"]
        assert one.block_table.tolist() == (table[:3] * 2).tolist()
        assert one.prefix_lens.data_ptr() == levels.prefix_lens.data_ptr()
        assert one.scratch is levels.scratch["draft.0"]
        assert one.scratch.shape == (MAX_REQS, SHAPE.steps * SHAPE.topk, 2, 16)
        assert (one.num_reqs, one.max_seq_len) == (3, 50)
