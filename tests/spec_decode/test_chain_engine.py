"""Trees of one child per node are chains, which any target's own attention verifies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.pairs import Answer, Pair, Request, answer_all, differing
from tests.support.engines.shipped_pair import SHIPPED
from tests.support.models.window_models import with_windows
from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.presets import node_count
from vllm_graft.spec_decode.refusals import tree_refusals
from vllm_graft.spec_decode.targets.dense.layer import TreeAttentionMixin
from vllm_graft.testing import model_runner, spec_metrics

pytestmark = pytest.mark.engine


def attended_by_trees(llm: Any) -> list[str]:
    """Names of the layers that tree attention was put over."""
    layers = model_runner(llm).vllm_config.compilation_config.static_forward_context
    return [
        name
        for name, layer in layers.items()
        if isinstance(getattr(layer, "impl", None), TreeAttentionMixin)
    ]


def test_a_chain_of_the_pair(pair: Pair, samples: list[Request], expected: list[Answer]) -> None:
    with pair.engine(nodes=5, topk=1, steps=5) as llm:
        assert differing(answer_all(llm, samples), expected) == []
        metrics = spec_metrics(llm)
        # The draft's alone.
        assert len(attended_by_trees(llm)) == 1
    assert metrics.accepted_tokens > metrics.drafts / 2


def test_a_chain_of_a_target_that_trees_refuse(
    tmp_path: Path, samples: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows stand for any feature that no family serves."""
    kinds = ["sliding_attention", "full_attention"] * 3
    target = with_windows(SHIPPED / "target", tmp_path / "target", kinds)
    windows = Pair(str(target), str(SHIPPED / "eagle3"), [])
    with windows.engine() as llm:
        alone = answer_all(llm, samples)
    for module in (tree_refusals, node_count):
        monkeypatch.setattr(module, "served_features", set)
    # Negative control: no chain for whoever wants none.
    words = r"set --additional-config\.graft\.tree\.topk to 1 for a chain"
    with pytest.raises(ConfigError, match=words):
        windows.engine(nodes=15, tree={"fallback": "refuse"}).__enter__()
    with windows.engine(nodes=15, topk=4, steps=5) as llm:
        assert differing(answer_all(llm, samples), alone) == []
        metrics = spec_metrics(llm)
        assert model_runner(llm).num_speculative_steps == 5
        assert len(attended_by_trees(llm)) == 1
    assert metrics.accepted_tokens > metrics.drafts / 4
