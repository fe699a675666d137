"""Drafts that carry their parents."""

from __future__ import annotations

import torch

from vllm_graft.spec_decode.grammars.packed_drafts import is_packed, pack, tokens_of, unpack

TOKENS = torch.tensor([[5, 0, 2**31 - 1, 7], [9, 8, -1, -1]])
PARENTS = torch.tensor([[0, 0, 2, 63], [0, 1, 0, 0]], dtype=torch.int32)


def test_tokens_and_parents_come_back() -> None:
    whole, padded = pack(TOKENS, PARENTS).tolist()
    assert unpack(whole).tokens == [-1, 5, 0, 2**31 - 1, 7]
    assert unpack(whole).parents == [-1, 0, 0, 2, 63]
    assert tokens_of(whole) == TOKENS[0].tolist()
    assert unpack(padded) == ([-1, 9, 8], [-1, 0, 1])
    assert tokens_of(padded) == [9, 8, -1, -1]


def test_a_prefix_is_the_smaller_tree() -> None:
    whole = pack(TOKENS, PARENTS).tolist()[0]
    assert unpack(whole[:2]) == ([-1, 5, 0], [-1, 0, 0])


def test_lists_without_parents_are_told_apart() -> None:
    whole, padded = pack(TOKENS, PARENTS).tolist()
    assert is_packed(whole)
    assert is_packed(padded)
    assert not is_packed([])
    assert not is_packed([-1, -1])
    assert not is_packed([0, 2**32 - 1])


def test_paths_and_children() -> None:
    tree = unpack(pack(TOKENS[:1, :3], PARENTS[:1, :3]).tolist()[0])
    assert tree.children == [[1, 2], [], [3], []]
    assert [tree.path(node) for node in range(4)] == [[], [1], [2], [2, 3]]
