"""What trees allocate beside their draft is where sleep mode keeps it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.engines.pairs import Pair


@pytest.mark.engine
def test_all_of_it_is_allocated_in_memory_that_is_kept(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU has no sleep mode: a pool stands in that says when it is in use."""
    from vllm_graft.spec_decode.drafters import tree_drafting
    from vllm_graft.testing import model_runner

    seen: list[str] = []

    @contextlib.contextmanager
    def pool(vllm_config: Any) -> Iterator[None]:
        assert vllm_config.speculative_config.num_speculative_tokens == 3
        seen.append("begin")
        yield
        seen.append("end")

    def noted(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return original(*args, **kwargs)

        return call

    monkeypatch.setattr(tree_drafting, "kept_memory", pool)
    owner = tree_drafting.TreeDrafting
    names = ("make_head", "allocate_context", "allocate_growths")
    for name in names:
        monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
    attach = tree_drafting.ServedLayers.attach
    monkeypatch.setattr(tree_drafting.ServedLayers, "attach", noted("attach", attach))
    with pair.engine(nodes=3, tree={"head_dtype": "fp8", "ngram": True}) as llm:
        assert model_runner(llm).speculator.head.fp8 is not None
    assert seen == ["begin", *names, "attach", "end"]
