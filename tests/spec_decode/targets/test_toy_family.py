"""The kernel of the toy family equals the reference; its rows are found where ours are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import toy_family
from tests.support.samples.attention_samples import TOLERANCE, untouched
from vllm_graft import doctor
from vllm_graft.base.errors import EntryError, HookError
from vllm_graft.hooks import manager
from vllm_graft.hooks.entries import TargetFamily
from vllm_graft.spec_decode.refusals.tree_refusals import refusals
from vllm_graft.spec_decode.targets.dense.plain_attention import tree_attention_reference
from vllm_graft.spec_decode.targets.dense.samples import AttentionShape, tree_problem


def test_the_kernel_equals_the_reference() -> None:
    shape = AttentionShape((7, 0, 4, 1), (60, 9, 33, 1), kv_heads=2, group=2, head_size=32)
    batch = tree_problem(shape, "cpu")
    found, expected = untouched(batch.query), untouched(batch.query)
    toy_family.toy_attention(batch, found)
    tree_attention_reference(batch, expected)
    near = TOLERANCE[torch.float32]
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


def test_its_rows_are_found(plugin: Any) -> None:
    ours = [row.what for row in refusals()]
    plugin(toy_family)
    theirs = [row.what for row in refusals()]
    assert [what for what in theirs if what not in ours] == ["toys with many children"]
    assert [what for what in theirs if what in ours] == ours
    [found] = doctor._seams_of_families(manager.manager())
    assert found.ok
    assert found.check.startswith("seam of toy")


@pytest.mark.parametrize("key", ["refusals", "seams"])
def test_rows_that_are_nowhere_are_refused(key: str) -> None:
    with pytest.raises(HookError, match=f"TargetFamily 'toy': {key}='rows' must read"):
        TargetFamily("toy", "toy:Family", "", **{key: "rows"})
    entry = TargetFamily("toy", "toy:Family", "", **{key: "tests.support.toy_family:GONE"})
    with pytest.raises(EntryError, match="'toy' cannot be loaded from"):
        getattr(entry, f"own_{key}")()
