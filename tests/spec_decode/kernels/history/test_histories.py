"""Kernels that read a row's history, against vLLM's own on each path as a chain."""

import random
from typing import NamedTuple

import pytest
import torch

from vllm_graft.spec_decode.kernels.history import (
    BadWords,
    PathTokens,
    Penalties,
    ThinkingBudgets,
    end_reasoning,
    forbid_bad_words,
    path_tokens,
    penalize,
)
from vllm_graft.spec_decode.trees.tree import TreeState

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 3000
"""It is more than a program of ours computes, and no multiple of 32."""
SLOTS = [3, 0, 2]
"""Request-state index of each request."""


class Batch(NamedTuple):
    """Rows of trees of 7 nodes, of 12, and of a root alone."""

    tree: TreeState
    ids: torch.Tensor
    nodes: torch.Tensor
    slots: torch.Tensor
    histories: list[list[int]]
    """Tokens on the path to each row."""


def i32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def make_batch(draw: random.Random) -> Batch:
    tree = TreeState.allocate(4, 12, DEVICE)
    ids, nodes, slots, histories = [], [], [], []
    for slot, drafts in zip(SLOTS, (7, 12, 0), strict=True):
        depths, paths = [0], [[]]
        for node in range(drafts + 1):
            # Few tokens, so that some of them repeat.
            token = draw.choice([5, 6, 7, 2500])
            if node:
                parent = draw.randrange(node)
                tree.parents[slot, node] = parent
                depths.append(depths[parent] + 1)
                paths.append([*paths[parent], token])
            ids.append(token)
            nodes.append(node)
            slots.append(slot)
        tree.depths[slot, : drafts + 1] = i32(depths)
        histories += paths
    index = torch.tensor(slots, device=DEVICE)
    return Batch(tree, i32(ids), i32(nodes), index, histories)


def with_tokens(batch: Batch, tokens: list[int]) -> Batch:
    """Return the same trees with other tokens."""
    histories = []
    for row, (slot, node) in enumerate(
        zip(batch.slots.tolist(), batch.nodes.tolist(), strict=True)
    ):
        path, first = [], row - node
        while node:
            path.append(tokens[first + node])
            node = int(batch.tree.parents[slot, node])
        histories.append(path[::-1])
    return batch._replace(ids=i32(tokens), histories=histories)


def paths_of(batch: Batch) -> PathTokens:
    return path_tokens(batch.ids, batch.nodes, batch.slots, batch.tree)


def chains(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """Each row's path as rows of a chain: ids, places, slots; and the last row of each chain."""
    ids: list[int] = []
    places: list[int] = []
    slots: list[int] = []
    last = []
    for slot, history in zip(batch.slots.tolist(), batch.histories, strict=True):
        ids += [0, *history]
        places += range(len(history) + 1)
        slots += [slot] * (len(history) + 1)
        last.append(len(ids) - 1)
    return i32(ids), i32(places), torch.tensor(slots, device=DEVICE), last


def test_path_tokens() -> None:
    batch = make_batch(random.Random(1))
    found = paths_of(batch)
    lengths = found.lengths.tolist()
    tokens = [row[:n] for row, n in zip(found.tokens.tolist(), lengths, strict=True)]
    assert tokens == batch.histories
    assert max(lengths) > 2


def penalties(draw: random.Random) -> Penalties:
    generator = torch.Generator().manual_seed(draw.randrange(1000))
    bits = torch.randint(-(2**31), 2**31, (4, (VOCAB + 31) // 32), generator=generator)
    counts = torch.randint(0, 3, (4, VOCAB), generator=generator)
    counts[:, [5, 6, 7]] = 0
    factors = [[1.3, 1.0, 1.0, 0.7], [0.4, 0.0, 0.3, 0.0], [0.6, 0.0, 0.0, -0.5]]
    repetition, frequency, presence = (torch.tensor(each, device=DEVICE) for each in factors)
    return Penalties(
        repetition,
        frequency,
        presence,
        bits.to(DEVICE, torch.int32),
        counts.to(DEVICE, torch.int32),
    )


def stock_penalties(batch: Batch, logits: torch.Tensor, kept: Penalties) -> torch.Tensor:
    from vllm.v1.worker.gpu.sample.penalties import apply_penalties

    ids, places, slots, last = chains(batch)
    owner = [row for row, path in enumerate(batch.histories) for _ in range(len(path) + 1)]
    rows = logits[owner].clone()
    apply_penalties(
        rows, slots, ids, places, kept.repetition, kept.frequency, kept.presence,
        kept.prompt_bits, kept.counts,
    )  # fmt: skip
    return rows[last]


@pytest.mark.parametrize("seed", [1, 2])
def test_penalties_are_vllms_on_each_path(seed: int) -> None:
    draw = random.Random(seed)
    batch, kept = make_batch(draw), penalties(draw)
    logits = torch.randn(len(batch.ids), VOCAB, device=DEVICE)
    expected = stock_penalties(batch, logits, kept)
    found = logits.clone()
    penalize(found, batch.slots, paths_of(batch), kept)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert not torch.equal(found, logits)
    # Negative control: without the paths, the rows of nodes differ.
    unaware = logits.clone()
    none = PathTokens(paths_of(batch).tokens, torch.zeros_like(batch.ids))
    penalize(unaware, batch.slots, none, kept)
    differs = (unaware != found).any(1).tolist()
    assert any(differs)
    assert not any(differs[row] for row, path in enumerate(batch.histories) if not path)


def bad_words() -> BadWords:
    words = [[5], [5, 6], [6, 7, 5], [9, 5, 5, 2500], [7, 7]]
    flat = [token for word in words for token in word]
    offsets = [0]
    for word in words:
        offsets.append(offsets[-1] + len(word))
    # Slot 0 has no bad words; what was emitted ends in 9, 5, then the root's token.
    prompt, emitted = [1, 5, 6], [8, 9, 5]
    return BadWords(
        i32([0, 0, 5, 5]),
        i32([offsets] * 4),
        i32([flat] * 4),
        i32([prompt + emitted + [77] * 6] * 4),
        i32([len(prompt)] * 4),
        i32([len(prompt + emitted)] * 4),
    )


def test_bad_words_are_vllms_on_each_path() -> None:
    from vllm.v1.worker.gpu.sample.bad_words import apply_bad_words

    batch, kept, most = make_batch(random.Random(4)), bad_words(), 5
    ids, places, slots, last = chains(batch)
    rows = torch.zeros(len(ids), VOCAB, device=DEVICE)
    apply_bad_words(
        rows, slots, kept.tokens, kept.offsets, kept.numbers, kept.all_tokens, kept.prompt_lens,
        kept.total_lens, ids, places, most,
    )  # fmt: skip
    found = torch.zeros(len(batch.ids), VOCAB, device=DEVICE)
    forbid_bad_words(found, batch.slots, paths_of(batch), kept, most)
    assert torch.equal(found, rows[last])
    assert found.isinf().sum() > len(batch.ids) // 2
    # Negative control: without the paths, other words are forbidden.
    unaware = torch.zeros_like(found)
    none = PathTokens(paths_of(batch).tokens, torch.zeros_like(batch.ids))
    forbid_bad_words(unaware, batch.slots, none, kept, most)
    assert not torch.equal(unaware, found)


THOUGHTS = [
    [7, 9, 8, 8],  # It thinks since its first token; the budget of 3 is used up.
    [8, 8, 8, 7],  # The start marker may end in the tree.
    [7, 9, 8, 6],  # So may the end marker.
    [8, 7, 9, 5],  # The budget may run out in the tree, or within the forced tokens.
]
"""Tokens of each request-state index. 7, 9 begin the reasoning; 6, 5 end it; 5, 6, 7 are forced."""


def thinking_budgets(budgets: list[int]) -> ThinkingBudgets:
    starts = [0, -1, 0, 1]
    return ThinkingBudgets(
        i32(budgets),
        i32(starts),
        i32([-1] * 4),
        i32([thoughts + [77] * 6 for thoughts in THOUGHTS]),
        i32([4] * 4),
        i32([7, 9]),
        i32([6, 5]),
        i32([5, 6, 7]),
    )


def stock_thinking(batch: Batch, kept: ThinkingBudgets) -> torch.Tensor:
    """vLLM's logits at the last row of each path. It finds the markers of the own tokens itself."""
    from vllm.v1.worker.gpu.sample.thinking_budget import apply_thinking_budget

    ids, places, slots, last = chains(batch)
    rows = torch.zeros(len(ids), VOCAB, device=DEVICE)
    cache = [torch.full_like(kept.budgets, value) for value in (-1, -1, 0)]
    apply_thinking_budget(
        rows, i32(SLOTS), slots, kept.budgets, kept.all_tokens, kept.total_lens, ids, places,
        *cache, kept.start_marker, kept.end_marker, kept.forced,
    )  # fmt: skip
    assert [cache[0][slot] for slot in SLOTS] == [kept.starts[slot] for slot in SLOTS]
    assert [cache[1][slot] for slot in SLOTS] == [kept.ends[slot] for slot in SLOTS]
    return rows[last]


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_thinking_budgets_are_vllms_on_each_path(seed: int) -> None:
    draw = random.Random(seed)
    batch = make_batch(draw)
    tokens = [draw.choice([5, 6, 7, 9, 9]) for _ in batch.ids.tolist()]
    batch = with_tokens(batch, tokens)
    kept = thinking_budgets([3, 2, 4, 3])
    expected = stock_thinking(batch, kept)
    found = torch.zeros_like(expected)
    end_reasoning(found, batch.slots, paths_of(batch), kept)
    assert torch.equal(found, expected)
    forced = found.argmax(1)[found.any(1)].tolist()
    assert 0 < len(forced) < len(batch.ids)
    assert len(set(forced)) > 1
    # Negative control: without the paths, other rows are forced.
    unaware = torch.zeros_like(found)
    none = PathTokens(paths_of(batch).tokens, torch.zeros_like(batch.ids))
    end_reasoning(unaware, batch.slots, none, kept)
    assert not torch.equal(unaware, found)


def test_no_budget_forces_nothing() -> None:
    batch = make_batch(random.Random(1))
    logits = torch.zeros(len(batch.ids), VOCAB, device=DEVICE)
    end_reasoning(logits, batch.slots, paths_of(batch), thinking_budgets([-1] * 4))
    assert not logits.any()
