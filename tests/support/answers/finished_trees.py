"""Each finished tree beside the one that a plain reference makes of the same candidates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.support.references.tree_reference import finish_tree_reference


def finish_and_compare(
    finish: Callable[..., None], table: Any, num_reqs: int, *args: Any, **extra: Any
) -> None:
    """Finish trees by `finish`, whose arguments are those of `finish_tree`, and by the reference.

    Raises:
        AssertionError: if trees, drafts, or the marks of nodes of other sources differ.
    """
    *sizes, slots, tree, drafts = args
    finish(table, num_reqs, *args, **extra)
    nodes = extra.get("extra_nodes")
    other = type(tree)(*(each.clone() for each in vars(tree).values()))
    again, marked = drafts.clone(), None if nodes is None else nodes.clone()
    reference: Callable[..., None] = finish_tree_reference
    reference(table, num_reqs, *sizes, slots, other, again, **{**extra, "extra_nodes": marked})
    ours, theirs = [*vars(tree).values(), drafts], [*vars(other).values(), again]
    if nodes is not None:
        ours, theirs = [*ours, nodes], [*theirs, marked]
    for mine, expected in zip(ours, theirs, strict=True):
        assert torch.equal(mine, expected)
