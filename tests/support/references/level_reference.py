"""Trees that grow by levels, checked in two ways while an engine drafts them.

Each tree is grown again in plain Python from the logits that the draft's passes left. And the draft
runs again for each node with children, along the path to it alone, as a chain of these tokens; its
logits must be those that the level had. What a chain drafts is compared with stock vLLM elsewhere.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.support.references.block_reference import Node, Seen, compare
from vllm_graft.spec_decode.drafters.levels import LevelGrowth, LevelMemory
from vllm_graft.spec_decode.drafters.tree_drafting import TreeDrafting
from vllm_graft.spec_decode.heads.head import DraftHead
from vllm_graft.spec_decode.trees.tree import TreeShape

Frontiers = dict[int, list[Node]]
"""The nodes of each level that get children, in the order of their rows."""


@contextmanager
def compared(
    monkeypatch: pytest.MonkeyPatch, *, chains: int = 4, tolerance: float = 1e-3
) -> Iterator[Seen]:
    """Compare each tree that is drafted inside; requests are to be greedy."""
    seen = Seen()
    stock, logits_of = TreeDrafting.grow_and_choose, DraftHead.logits
    dumped: list[torch.Tensor] = []
    left = [chains]

    def logits(head: DraftHead, *args: Any, **kwargs: Any) -> torch.Tensor:
        dumped.append(logits_of(head, *args, **kwargs))
        return dumped[-1]

    def grow_and_choose(draft: Any, plan: Any, num_reqs: int, *args: Any) -> None:
        stock(draft, plan, num_reqs, *args)
        levels = dumped[-plan.shape.steps :]
        dumped.clear()
        live = [row for row, slot in enumerate(draft.idx_mapping[:num_reqs].tolist()) if slot >= 0]
        found = {row: _compare_row(draft, plan.shape, row, levels, seen) for row in live}
        if live == list(range(num_reqs)) and live and left[0]:
            left[0] -= 1
            _compare_chains(draft, plan, levels, found, args[0], tolerance)
        dumped.clear()

    with monkeypatch.context() as patch:
        patch.setattr(DraftHead, "logits", logits)
        patch.setattr(TreeDrafting, "grow_and_choose", grow_and_choose)
        yield seen
    assert left == [0], "too few steps to run the draft again in"


def _compare_row(
    draft: Any, shape: TreeShape, row: int, levels: list[torch.Tensor], seen: Seen
) -> Frontiers:
    """Grow the tree of a row again; returns its frontiers."""
    frontiers: Frontiers = defaultdict(list)
    ids = draft.head.target_ids
    vocabulary = list(range(levels[0].shape[1])) if ids is None else ids.tolist()

    def score(level: int, node: Node) -> tuple[torch.Tensor, list[int]]:
        place = row * (shape.topk if level else 1) + len(frontiers[level])
        frontiers[level].append(node)
        return levels[level][place], vocabulary

    compare(draft, shape, row, int(draft.idx_mapping[row]), score, 0, seen)
    return frontiers


def _compare_chains(
    draft: Any,
    plan: Any,
    levels: list[torch.Tensor],
    found: dict[int, Frontiers],
    metadata: list[Any],
    tolerance: float,
) -> None:
    shape, num_reqs = plan.shape, len(found)
    chain = _chain_beside(draft, plan.growth, num_reqs)
    for level in range(1, shape.steps):
        for place in range(shape.topk):
            paths = [_path(found[row], level, place) for row in range(num_reqs)]
            ours = levels[level].unflatten(0, (num_reqs, shape.topk))[:, place]
            wanted = _logits_along(draft, chain, paths, metadata)
            torch.testing.assert_close(ours, wanted, atol=tolerance, rtol=tolerance)


def _path(frontiers: Frontiers, level: int, place: int) -> list[int]:
    """The tokens from a child of the root to a node of a frontier."""
    node, tokens = frontiers[level][place], []
    for above in range(level - 1, -1, -1):
        tokens.append(node.token)
        if above:
            node = next(each for each in frontiers[above] if each.place == node.parent)
    return tokens[::-1]


def _chain_beside(draft: Any, growth: LevelGrowth, num_reqs: int) -> LevelGrowth:
    """Levels of one node with a scratch of their own, behind the same prefixes."""
    layers = draft.vllm_config.compilation_config.static_forward_context
    shape = TreeShape(1, growth.shape.steps, growth.shape.steps)
    memory = LevelMemory(
        [shape],
        {name: layers[name] for name in growth.scratch},
        max_reqs=num_reqs,
        dtype=next(iter(growth.scratch.values())).dtype,
        device=growth.prefix_lens.device,
    )
    chain = LevelGrowth(shape, memory, growth.tokens.dtype, one_position=growth.one_position)
    for scratch in chain.scratch.values():
        scratch.fill_(float("nan"))
    # In a tree of one branch each node has the slot of its level.
    chain.candidates.ancestors.copy_(torch.arange(shape.steps))
    chain.prefix_lens.copy_(growth.prefix_lens[:num_reqs])
    chain.block_tables = growth.block_tables
    return chain


def _logits_along(
    draft: Any, chain: LevelGrowth, paths: list[list[int]], metadata: list[Any]
) -> torch.Tensor:
    """Logits ``[num_reqs, vocabulary]`` behind the last tokens of some paths, of equal length."""
    num_reqs = len(paths)
    longest = next(iter(metadata[0].values())).max_seq_len
    metadata = chain.metadata(num_reqs, longest)
    states, output = draft.last_states[:num_reqs].clone(), None
    for depth, tokens in enumerate(zip(*paths)):
        positions = draft.last_positions[:num_reqs] + depth + 1
        output, states = draft.run_frontier(
            torch.tensor(tokens, dtype=chain.tokens.dtype, device=positions.device),
            positions.clamp(max=draft.max_model_len - 1),
            states.clone(),
            metadata[depth],
            None,
        )
    assert output is not None
    return draft.head.logits(output)
