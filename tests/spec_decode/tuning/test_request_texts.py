"""What trees of kinds of requests yield, learned from what such trees have yielded."""

import random

import numpy as np
import pytest

from vllm_graft.spec_decode.trees.shape import MAX_NODES
from vllm_graft.spec_decode.tuning.request_texts import KINDS, REFRESH, TOLD, RequestTexts

CHAIN = 7
"""Levels of the trees, which are chains as far as they have no more nodes."""


def learned(steps: int = 1500, width: int = 31, kept: float = 0.97) -> RequestTexts:
    """Texts of four requests that copy, with a chance of going on, and of four that never do."""
    rng, texts = random.Random(0), RequestTexts()
    names = [f"{kind}{number}" for kind in ("copy", "chat") for number in range(4)]
    for _ in range(steps):
        emitted = []
        for name in names:
            count, (chance, most) = 1, (kept, width) if "copy" in name else (0.5, 4)
            while count <= most and rng.random() < chance:
                count += 1
            emitted.append(count)
        texts.observe(names, [width] * len(names), emitted, CHAIN)
    return texts


def test_kinds_are_told_apart_and_yield_what_they_have_yielded() -> None:
    texts = learned()
    copies, chats = texts.kinds(["copy0", "copy3"]), texts.kinds(["chat0", "chat3"])
    assert min(copies) > max(chats)
    yields = texts.yields(CHAIN, 0.3)
    assert yields.shape == (KINDS, MAX_NODES + 1)
    assert not yields[:, 0].any()
    assert (np.diff(yields, axis=1) >= -1e-9).all(), "more nodes yield no less"
    of_copy, of_chat = yields[copies.max()], yields[chats.max()]
    expected = sum(0.97**depth for depth in range(1, 32))
    assert of_copy[31] == pytest.approx(expected, rel=0.2)
    assert of_chat[31] < 3
    assert of_copy[3] == pytest.approx(sum(0.97**d for d in (1, 2, 3)), rel=0.1)


def test_what_begins_to_copy_changes_its_kind_within_a_few_steps() -> None:
    texts = learned(200)
    before = texts.kinds(["chat0"])[0]
    for _ in range(8):
        texts.observe(["chat0"], [31], [32], CHAIN)
    assert texts.kinds(["chat0"])[0] > before + 3
    assert texts.kinds(["chat0"])[0] >= texts.kinds(["copy0"])[0]


def test_a_chain_that_was_all_accepted_says_nothing_of_what_is_deeper() -> None:
    texts = RequestTexts()
    for _ in range(50 * TOLD):
        texts.observe(["a", "b"], [3, 3], [4, 4], CHAIN)
    kind = texts.kinds(["a"])[0]
    assert not texts._tried[:, 3:].any()
    yields = texts.yields(CHAIN, 0.3)[kind]
    assert yields[3] > 2.8
    assert yields[7] > 5, "what comes next is taken for as likely"


def test_only_requests_in_flight_are_remembered() -> None:
    texts = RequestTexts()
    for step in range(40 * TOLD):
        texts.observe([f"{step}", f"{step + 1}"], [7, 7], [2, 3], CHAIN)
    assert len(texts._means) <= TOLD + 1
    assert len(texts._told) < TOLD
    # One of which nothing is known is of the mean kind.
    assert texts.kinds(["new"])[0] == int(2 * texts._usual)


def test_yields_are_computed_seldom() -> None:
    texts = learned(100)
    found = texts.yields(CHAIN, 0.3)
    texts.observe(["copy0"], [31], [32], CHAIN)
    assert texts.yields(CHAIN, 0.3) is found
    for _ in range(REFRESH):
        texts.observe(["copy0"], [31], [32], CHAIN)
    assert texts.yields(CHAIN, 0.3) is not found


def test_levels_bound_what_is_no_copy() -> None:
    """Trees of few levels go on beyond them only as often as trees of such requests did."""
    texts = RequestTexts()
    for _ in range(100):
        texts.observe(["easy", "copy"], [30, 30], [5, 26], 4)
    easy, copy = texts.yields(4, 0.3)[texts.kinds(["easy", "copy"])]
    assert easy[30] < 4.5
    assert copy[30] > 15
