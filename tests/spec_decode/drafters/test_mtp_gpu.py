"""Engines on a device whose target's own MTP module drafts trees, in FULL graphs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.answers.text_requests import TEXTS
from tests.support.engines.gpu_engines import exact_engine
from tests.support.engines.pairs import Request, answer_all, differing
from tests.support.models.mtp_targets import write_glm4_moe, write_mimo
from vllm_graft.spec_decode.tuning.tuner import NodeTuner
from vllm_graft.testing import model_runner, spec_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

REQUESTS = [
    Request(text, {"max_tokens": 40, **kind})
    for text in TEXTS[:3]
    for kind in ({"temperature": 0}, {"seed": 7})
]
TREE = {"topk": 4, "steps": 4, "graph_runner": "verify"}


@pytest.mark.parametrize("write", [write_mimo, write_glm4_moe])
def test_a_perfect_module(write: Callable[[Path], Path], tmp_path: Path) -> None:
    """Hot tokens hold half of what is not emitted, too: the head is cut, behind its norm."""
    target = write(tmp_path / "target")
    with exact_engine(target) as llm:
        expected = answer_all(llm, REQUESTS)
    emitted = set(itertools.chain.from_iterable(each.tokens[0] for each in expected))
    hot = tmp_path / "hot.json"
    hot.write_text(json.dumps(sorted(emitted | set(range(0, 512, 2)))))
    tree = {**TREE, "hot_tokens": str(hot)}
    with exact_engine(target, tree=tree, nodes=15, method="mtp") as llm:
        assert differing(answer_all(llm, REQUESTS), expected) == []
        metrics = spec_metrics(llm)
        [info] = llm.collective_rpc("graft_info")
    # The first step of a short prompt is all that a perfect module may get wrong.
    assert metrics.accepted_per_position[0] > 0.9 * metrics.drafts
    assert metrics.accepted_per_position[2] > metrics.drafts / 2
    counters = info["counters"]["tree"]
    assert counters["draft_replays"] > 0
    assert counters["tree_replays"] > 0
    assert counters["draft_graphs_differing"] == {15: []}
    assert counters["draft_graphs_verified"][15]


def test_a_module_with_experts_has_graphs_of_narrow_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every number of the ladder takes its turn, chains of several levels among them."""
    target = write_glm4_moe(tmp_path / "target")
    with exact_engine(target) as llm:
        expected = answer_all(llm, REQUESTS)
    numbers = [1, 2, 3, 6, 4, 14, 15]
    turns = itertools.cycle(numbers)
    monkeypatch.setattr(NodeTuner, "begin_step", lambda tuner, batch: next(turns))
    tree = {**TREE, "shape": "auto"}
    with exact_engine(target, tree=tree, nodes=15, method="mtp") as llm:
        tuner = llm.llm_engine.engine_core.engine_core.scheduler.dynamic_sd_lookup.tuner
        assert set(tuner.costs) == {0, *numbers}
        assert differing(answer_all(llm, REQUESTS), expected) == []
        [info] = llm.collective_rpc("graft_info")
    counters = info["counters"]["tree"]
    widths = {each["num_nodes"]: each["topk"] for each in counters["shapes"]}
    assert widths == {1: 1, 2: 1, 3: 1, 4: 1, 6: 2, 14: 3, 15: 3}
    assert counters["draft_replays"] > 0
    assert not any(counters["draft_graphs_differing"].values())
    assert sum(map(bool, counters["draft_graphs_verified"].values())) > 4


def test_a_norm_and_a_head_in_fp8(tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs products of FP8 numbers")
    target = write_glm4_moe(tmp_path / "target")
    tree: dict[str, Any] = {"topk": 4, "steps": 4, "head_dtype": "fp8"}
    with exact_engine(target, tree=tree, nodes=15, method="mtp", dtype="bfloat16") as llm:
        answer_all(llm, REQUESTS)
        metrics = spec_metrics(llm)
        head = model_runner(llm).speculator.head
        assert head.fp8.weight.dtype == torch.float8_e4m3fn
        del head
        [info] = llm.collective_rpc("graft_info")
    assert metrics.accepted_per_position[0] > 0.8 * metrics.drafts
    assert info["counters"]["tree"]["fp8_head_bytes"] > 0
    assert info["counters"]["tree"]["draft_replays"] > 0
