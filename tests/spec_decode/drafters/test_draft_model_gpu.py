"""Trees of a standalone draft model on a device: an engine in FULL graphs."""

from __future__ import annotations

import pytest

from tests.support.engines.gpu_engines import exact_engine
from tests.support.engines.pairs import Request, answer_all, differing
from tests.support.engines.shipped_pair import SHIPPED
from vllm_graft.testing import spec_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.engine]


def test_an_engine_in_full_graphs() -> None:
    """The target is its own draft, so that nearly all drafts are right, seeded ones as well."""
    requests = [
        Request(text, {"max_tokens": 48, **kind})
        for text in ("def main(argv):\n", "import os, sys\nimport", "class Tree:\n    def")
        for kind in ({"temperature": 0}, {"seed": 7, "temperature": 0.6})
    ]
    target = SHIPPED / "target"
    with exact_engine(target) as llm:
        expected = answer_all(llm, requests)
    tree = {"topk": 4, "steps": 5}
    with exact_engine(target, draft=str(target), nodes=15, tree=tree, method="draft_model") as llm:
        # Graphs of the first pass have 17 rows per request, and here 128 rows at most.
        found = answer_all(llm, requests[:4]) + answer_all(llm, requests[4:])
        assert differing(found, expected) == []
        (info,) = llm.collective_rpc("graft_info")
        assert spec_metrics(llm).acceptance_length > 4.5
    counted = info["counters"]["tree"]
    assert counted["draft_replays"] > 0
    assert counted["first_pass_replays"] > counted["first_pass_launches"] > 0
    assert counted["tree_replays"] > 0
