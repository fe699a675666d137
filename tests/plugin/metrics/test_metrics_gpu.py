"""Metrics of trees on a device, where graphs are replayed and steps overlap with the next."""

from typing import Any

import pytest

from tests.support.answers.dashboard import without_data
from tests.support.answers.metrics_page import metrics_page
from tests.support.engines.gpu_engines import shipped_trees
from tests.support.engines.pairs import Pair
from tests.support.engines.shipped_pair import SHIPPED
from vllm_graft.metrics.server_info import total
from vllm_graft.testing import model_runner, spec_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.engine]


@pytest.mark.parametrize("shape", ["fixed", "auto"])
def test_the_page_says_what_the_engine_counted(shape: str) -> None:
    from vllm import SamplingParams

    prompts = Pair.load(SHIPPED).prompts
    with shipped_trees({"shape": shape}) as llm:
        for batch in (1, 3, 8):
            lengths = [SamplingParams(temperature=0, max_tokens=20 + 7 * i) for i in range(batch)]
            llm.generate(prompts[:batch], lengths, use_tqdm=False)
        counters = model_runner(llm).speculator.context.counters
        theirs: Any = spec_metrics(llm)
        page, name = metrics_page(), "vllm:graft_tree_"
        assert without_data(page, "", "tree") == []
        told = {
            "trees": theirs.drafts,
            "nodes_verified": theirs.draft_tokens,
            "nodes_accepted": theirs.accepted_tokens,
            "candidates_drafted": counters.nodes_drafted,
            "draft_replays": counters.draft_replays,
        }
        assert {key: total(page, f"{name}{key}_total") for key in told} == told
        for way in ("replays", "launches"):
            for batch_of, counted in (("trees", "tree"), ("mixed", "mixed")):
                found = total(page, f"{name}target_{way}_total", batch=batch_of)
                assert found == getattr(counters, f"{counted}_{way}")
        assert total(page, f"{name}draft_graphs") == len(
            model_runner(llm).speculator.draft_graphs()
        )
        assert total(page, f"{name}draft_graph_bytes") > 0
        assert total(page, "vllm:graft_info", part="tree", state="on") == 1
        assert total(page, "vllm:graft_metrics_errors_total") == 0
        # Small batches of trees have graphs, of the draft and of the target.
        assert counters.draft_replays > 0
        assert counters.tree_replays > 0
