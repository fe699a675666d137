"""The list of metrics: the page is the code's, names follow vLLM's, and every row is counted."""

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graft import cli
from vllm_graft.base.metric import Kind, Origin
from vllm_graft.base.text_table import Table
from vllm_graft.graph_runners.vision.graphs.vision_metrics import METRICS as VISION
from vllm_graft.metrics.catalogue import catalogue, tables
from vllm_graft.metrics.part_states import STATES
from vllm_graft.parts import PARTS
from vllm_graft.spec_decode.counts.tree_metrics import CHAIN_METRICS as CHAINS
from vllm_graft.spec_decode.counts.tree_metrics import METRICS as TREES
from vllm_graft.spec_decode.counts.tree_metrics import TreeWatch

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
EVERY = [row for rows in catalogue(PARTS).values() for row in rows]


def test_the_page_lists_what_the_code_counts() -> None:
    """`vllm-graft metrics --markdown` prints what stands between the marks."""
    _, _, rest = PAGE.partition("<!-- metrics:begin -->\n")
    listed, _, _ = rest.partition("\n<!-- metrics:end -->")
    assert listed == "\n\n".join(map(Table.markdown, tables(catalogue(PARTS))))
    assert len(EVERY) > 60


def test_the_page_explains_every_state() -> None:
    page, _, _ = PAGE.partition("## Dashboard")
    assert dict(re.findall(r"^\| `(\w+)` \| ([A-Z].+) \|$", page, re.MULTILINE)) == STATES


def test_the_command_prints_the_page_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["metrics", "--markdown"]) == 0
    assert capsys.readouterr().out.strip() in PAGE
    assert cli.main(["metrics", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in told] == [row.name for row in EVERY]
    assert {each["kind"] for each in told} == {"counter", "gauge", "histogram"}


def test_names_follow_prometheus_and_vllm() -> None:
    assert [name for name, times in Counter(row.name for row in EVERY).items() if times > 1] == []
    for row in EVERY:
        assert re.fullmatch(r"vllm:graft_[a-z][a-z0-9_]*", row.name)
        assert row.name.endswith("_total") == (row.kind is Kind.COUNTER)
        assert row.help.endswith(".")
        assert not re.search(r"_(gb|gbps|mb|ms|us|percent)(_|$)", row.name), "base units"
        assert all(re.fullmatch(r"[a-z_]+", label) for label in row.labels)


def counted_by(numbers: Any) -> dict[str, set[str]]:
    """The keys of a part's numbers, and the values of labels among them."""
    return {key: set(found) if isinstance(found, dict) else set() for key, found in numbers.items()}


def tree_numbers() -> Any:
    import torch

    from vllm_graft.spec_decode.config.tree_config import MemoryConfig, NgramConfig
    from vllm_graft.spec_decode.drafters.draft_trees import count
    from vllm_graft.spec_decode.heads.fp8_head import PlainRows
    from vllm_graft.spec_decode.heads.hot_vocabulary import HotVocabulary
    from vllm_graft.spec_decode.lookup.ngrams import Ngrams
    from vllm_graft.spec_decode.startup.ahead import Ahead
    from vllm_graft.spec_decode.startup.clock import StartClock
    from vllm_graft.spec_decode.verification.accepted_kv import LayerSaves
    from vllm_graft.spec_decode.verification.context import Counters

    rows = PlainRows(SimpleNamespace(weight=torch.zeros(9, 2), tp_size=1), 4)
    ngrams = Ngrams(NgramConfig(), 1, 8, 9, torch.device("cpu"), reference=1, memory=MemoryConfig())
    sources = SimpleNamespace(ngrams=ngrams, unread=None)
    draft: Any = SimpleNamespace(
        head=SimpleNamespace(learned=HotVocabulary(4, torch.arange(9), 9, rows)),
        context=SimpleNamespace(
            counters=Counters(), drop=None, draft_window=0, kept_bytes=0, saves=LayerSaves()
        ),
        draft_graphs=list,
        trees=SimpleNamespace(sources=sources, graph_bytes=0, clock=StartClock(), ahead=Ahead()),
    )
    return count(draft)


def chain_numbers() -> Any:
    from vllm_graft.spec_decode.drafters.standalone.chain import ChainCounters, ChainSpeculator

    draft: Any = SimpleNamespace(counters=ChainCounters(), chain_runner=None, extend_runner=None)
    return ChainSpeculator.numbers(draft)


def vision_numbers() -> Any:
    from vllm_graft.graph_runners.vision.graphs.vision_metrics import VitStats
    from vllm_graft.graph_runners.vision.runner import ViTCudaGraphRunner

    budget = SimpleNamespace(used=0, limit=1)
    runner: Any = SimpleNamespace(
        stats=VitStats(), store=SimpleNamespace(exact={}, buckets={}, budget=budget)
    )
    return ViTCudaGraphRunner.numbers(runner)


@pytest.mark.parametrize(
    ("metrics", "numbers"),
    [(TREES, tree_numbers), (CHAINS, chain_numbers), (VISION, vision_numbers)],
    ids=["tree", "draft", "vit"],
)
def test_every_row_is_counted_and_every_number_has_a_row(metrics: Any, numbers: Any) -> None:
    found = counted_by(numbers())
    rows = {row.key: row for row in metrics.rows if row.origin is not Origin.ENGINE}
    assert found.keys() == rows.keys()
    for key, values in found.items():
        assert values <= set(rows[key].values)
    engine = {row.key for row in metrics.rows if row.origin is Origin.ENGINE}
    assert engine == (TreeWatch().numbers().keys() if metrics is TREES else set())
