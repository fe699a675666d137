"""What vLLM's statistics of a step tell of trees, and the line of the log."""

import random
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest

from vllm_graft.base import log
from vllm_graft.metrics.server_info import samples
from vllm_graft.spec_decode.counts.tree_log import TreeLogging, show_depths
from vllm_graft.spec_decode.counts.tree_metrics import METRICS, ROWS, WINDOW, TreeWatch


def statistics(paths: list[int], nodes: int, places: int) -> Any:
    """vLLM's `SpecDecodingStats` of trees of so many nodes and accepted paths of these lengths."""
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    stats = SpecDecodingStats.new(places)
    for path in paths:
        stats.observe_draft(num_draft_tokens=nodes, num_accepted_tokens=path)
    return stats


def test_trees_are_counted_by_depth() -> None:
    numbers, watch = random.Random(2), TreeWatch()
    depths: Counter[int] = Counter()
    sizes: Counter[str] = Counter()
    trees = verified = accepted = 0
    for _ in range(50):
        paths = [numbers.randrange(6) for _ in range(numbers.randrange(1, 4))]
        nodes = numbers.choice((7, 15, 31))
        watch.step(SimpleNamespace(spec_decoding_stats=statistics(paths, nodes, 31)))
        for path in paths:
            trees, verified, accepted = trees + 1, verified + nodes, accepted + path
            depths.update(range(1, path + 1))
        sizes[str(nodes)] += 1
    watch.step(SimpleNamespace(spec_decoding_stats=None))
    assert watch.numbers() == {
        "steps": 50,
        "trees": trees,
        "nodes_verified": verified,
        "nodes_accepted": accepted,
        "nodes_accepted_by_depth": {str(depth): number for depth, number in depths.items()},
        "nodes_per_tree": sizes,
        "draft_misfit": 0,
    }


@pytest.mark.parametrize(("accepted", "misfit"), [(99, True), (101, False)])
def test_a_draft_from_which_nothing_is_accepted_is_told_once(
    accepted: int, misfit: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The window's trees count, two a step, whatever those before it yielded."""
    log.warning_once.cache_clear()
    watch = TreeWatch()

    def run(paths: int) -> int:
        for step in range(WINDOW):
            own = [int(2 * step < paths), int(2 * step + 1 < paths)]
            watch.step(SimpleNamespace(spec_decoding_stats=statistics(own, 7, 7)))
        return watch.numbers()["draft_misfit"]  # type: ignore[return-value]

    assert [run(1000), run(accepted), run(accepted)] == [0, misfit, misfit]
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == misfit
    for line in lines:
        assert "500 steps with trees yielded 1.10 tokens per tree" in line
        assert "speculative_config.model was trained for this very target" in line
    assert run(1000) == 0


def test_fewer_steps_are_not_judged(caplog: pytest.LogCaptureFixture) -> None:
    log.warning_once.cache_clear()
    watch = TreeWatch()
    for _ in range(WINDOW - 1):
        watch.step(SimpleNamespace(spec_decoding_stats=statistics([0] * 64, 7, 7)))
    assert watch.numbers()["draft_misfit"] == 0
    assert not caplog.records


def test_every_number_has_a_row() -> None:
    assert METRICS.watch is not None
    assert METRICS.watch().numbers().keys() <= {row.key for row in ROWS}


def logged(logging: Any, steps: list[Any]) -> str:
    for stats in steps:
        logging.observe(stats)
    lines: list[str] = []
    logging.log(lambda text, *values: lines.append(text % values))
    logging.log(lambda text, *values: lines.append("again"))
    [line] = lines
    return line


def test_the_log_speaks_of_depths_where_vllm_s_divides_by_all_nodes() -> None:
    from vllm.v1.spec_decode.metrics import SpecDecodingLogging

    steps = [statistics([6, 4], 63, 63), statistics([6, 0], 63, 63)]
    ours, theirs = logged(TreeLogging(), steps), logged(SpecDecodingLogging(), steps)
    for line in (ours, theirs):
        assert line.startswith("SpecDecoding metrics: Mean acceptance length: 5.00, ")
    assert "Avg Draft acceptance rate: 6.3%" in theirs
    assert "draft acceptance rate" not in ours.lower()
    assert "Trees: 4, Nodes per tree: 63.0, Accepted: 16 tokens" in ours
    assert ours.endswith("Per-depth acceptance rate: 0.750, 0.750, 0.750, 0.750, 0.500, 0.500")


def test_a_log_without_an_accepted_node() -> None:
    line = logged(TreeLogging(), [statistics([0], 7, 7)])
    assert line.endswith("Per-depth acceptance rate: none")


@pytest.fixture
def counters() -> Iterator[Any]:
    """vLLM's counters of an engine that verifies 63 nodes, in Prometheus' registry."""
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics
    from vllm.v1.spec_decode.metrics import SpecDecodingProm

    unregister_vllm_metrics()
    labels: dict[int, list[object]] = {0: ["model", "0"], 1: ["model", "1"]}
    config: Any = SimpleNamespace(num_speculative_tokens=63)
    yield SpecDecodingProm(config, ["model_name", "engine"], labels)
    unregister_vllm_metrics()


def positions() -> dict[str, list[float]]:
    """The counters of accepted drafts in /metrics, in the order of positions, by engine."""
    found: dict[str, list[float]] = {}
    for each in samples(generate_latest().decode(), "vllm:spec_decode_num_accepted_tokens_per_pos"):
        if each.name.endswith("_total"):
            values = found.setdefault(each.labels["engine"], [])
            assert each.labels["position"] == str(len(values))
            values.append(each.value)
    return found


def test_positions_that_no_draft_reaches_are_not_shown(counters: Any) -> None:
    assert METRICS.tell is not None
    METRICS.tell(SimpleNamespace(topk=4, steps=5), [SimpleNamespace(spec_decoding_prom=counters)])
    assert positions() == {"0": [0] * 5, "1": [0] * 5}
    for _ in range(2):
        counters.observe(statistics([3, 1], 63, 63), 0)
    assert positions() == {"0": [4, 2, 2, 0, 0], "1": [0] * 5}
    # N-grams may lead deeper. Nothing is lost then.
    for path in (7, 6):
        counters.observe(statistics([path], 63, 63), 1)
    assert positions() == {"0": [4, 2, 2, 0, 0], "1": [2] * 6 + [1]}


def test_a_chain_s_positions_are_all_shown(counters: Any) -> None:
    assert METRICS.tell is not None
    METRICS.tell(SimpleNamespace(topk=1, steps=5), [SimpleNamespace(spec_decoding_prom=counters)])
    assert [*map(len, positions().values())] == [63, 63]


def test_counters_in_files_stay(counters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "x")
    show_depths(counters, 5)
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR")
    assert [*map(len, positions().values())] == [63, 63]


@pytest.mark.parametrize(("topk", "replaced"), [(4, True), (1, False)])
def test_a_chain_keeps_vllm_s_line(topk: int, replaced: bool) -> None:
    stock = object()
    loggers = [SimpleNamespace(spec_decoding_logging=stock), SimpleNamespace()]
    assert METRICS.tell is not None
    METRICS.tell(SimpleNamespace(topk=topk), loggers)
    assert (loggers[0].spec_decoding_logging is not stock) == replaced
    assert vars(loggers[1]) == {}
