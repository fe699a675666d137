"""The frontend's series: what a message adds to them, and what is left for vLLM's loggers."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.plugin.metrics.stand_ins import ROWS, Logger, Stats
from vllm_graft.base import log
from vllm_graft.base.version import __version__
from vllm_graft.metrics.board import Board, taken_out
from vllm_graft.metrics.relay import KEY
from vllm_graft.metrics.server_info import total
from vllm_graft.metrics.wiring import counted_rows

NEWS = {"toy": {"done": 4, "seen": 2, "sizes": {"3": 2}, "no": {"full": 1}, "room": 7}}


def config(stages: int = 1) -> Any:
    return SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=stages))


def board(engines: int = 1) -> tuple[Board, Logger]:
    logger = Logger(engines)
    return Board({"toy": counted_rows(ROWS, config())}, logger), logger


def stats(**message: Any) -> Stats:
    return Stats(kv_connector_stats={KEY: message})


def test_series_are_there_at_zero_from_the_start() -> None:
    _, logger = board()
    for line in (
        'vllm:graft_toy_done_total{engine="0",model_name="model"} 0.0',
        'vllm:graft_toy_declined_total{engine="0",model_name="model",reason="late"} 0.0',
        'vllm:graft_toy_sizes_count{engine="0",model_name="model"} 0.0',
        'vllm:graft_metrics_errors_total{engine="0",model_name="model",process="frontend"} 0.0',
    ):
        assert line in logger.text.splitlines()


def test_messages_add_up_by_engine() -> None:
    found, logger = board(engines=2)
    found.record(stats(news=NEWS), 1)
    found.record(stats(news=NEWS), 1)
    found.record(stats(news={"toy": {"done": 1}}), 0)
    text, name = logger.text, "vllm:graft_toy_"
    assert total(text, f"{name}done_total", engine="1") == 8
    assert total(text, f"{name}done_total", engine="0") == 1
    assert total(text, f"{name}declined_total", reason="full") == 2
    # A gauge has its latest value.
    assert total(text, f"{name}room", engine="1") == 7
    assert total(text, f"{name}sizes_count") == 4
    assert total(text, f"{name}sizes_sum") == 12
    assert total(text, f"{name}sizes_bucket", le="1.0") == 0
    assert total(text, f"{name}sizes_bucket", le="4.0") == 4


def test_what_a_connector_counts_is_not_counted_twice() -> None:
    _, logger = board()
    assert "vllm:graft_toy_far" not in logger.text


def test_with_several_stages_a_rank_that_does_not_encode_reports_nothing_of_it() -> None:
    names = [row.name for row in counted_rows(ROWS, config(stages=2))]
    assert "done" in names
    assert "room" not in names


def test_a_message_is_taken_out_before_vllm_looks() -> None:
    found, _ = board()
    alone, beside = stats(news=NEWS), stats(news=NEWS)
    assert beside.kv_connector_stats is not None
    beside.kv_connector_stats["pages"] = 3
    found.record(alone, 0)
    found.record(beside, 0)
    assert alone.kv_connector_stats is None
    assert beside.kv_connector_stats == {"pages": 3}
    assert taken_out(None) is None
    assert taken_out(Stats()) is None


def test_a_state_that_is_no_longer_so_is_zero() -> None:
    found, logger = board()
    found.record(stats(states=[["toy", "on", "toys"], ["vit", "off", "text only"]]), 0)
    found.record(stats(states=[["toy", "declined", "no room"], ["vit", "off", "text only"]]), 0)
    name, version = "vllm:graft_info", __version__
    assert total(logger.text, name, part="toy", state="on", detail="toys", version=version) == 0
    assert total(logger.text, name, part="toy", state="declined", detail="no room") == 1
    assert total(logger.text, name, part="vit") == 1


def test_a_failure_is_counted_and_the_message_still_taken_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log.warning_once.cache_clear()
    found, logger = board()
    broken = stats(news={"toy": {"sizes": 3}})
    found.record(broken, 0)
    assert broken.kv_connector_stats is None
    assert total(logger.text, "vllm:graft_metrics_errors_total", process="frontend") == 1
    assert "a frontend's metrics are incomplete" in caplog.text


def test_other_processes_failures_are_shown() -> None:
    found, logger = board()
    found.record(stats(errors={"worker": 2, "engine": 1}), 0)
    assert total(logger.text, "vllm:graft_metrics_errors_total", process="worker") == 2


def test_what_no_row_names_is_passed_over() -> None:
    """A worker of another version may count more than this frontend knows."""
    found, logger = board()
    found.record(stats(news={"toy": {"newer": 3}, "other": {"done": 3}}), 0)
    assert total(logger.text, "vllm:graft_metrics_errors_total") == 0
