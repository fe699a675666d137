"""Hooks in stand-ins of vLLM's engine core and loggers: inert unless asked for, never harmful."""

import queue
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.plugin.metrics.stand_ins import METRICS, EngineOutputs, Logger, Output, Stats
from vllm_graft.base import log
from vllm_graft.base.options import KEY as GRAFT
from vllm_graft.metrics.relay import KEY
from vllm_graft.metrics.server_info import total
from vllm_graft.metrics.wiring import Wiring

EXTENSION = "vllm_graft.WorkerExtension"


class Toy:
    name = "toy"
    metrics = METRICS["toy"]

    def describe(self, asked: Any, vllm_config: Any) -> str:
        return "toys"


TOY: Any = Toy()


def asked_for(vllm_config: Any) -> list[Any]:
    section = vllm_config.additional_config.get(GRAFT)
    return [] if section is None else [(TOY, section)]


def config(*, asked: bool = True) -> Any:
    parallel = SimpleNamespace(
        pipeline_parallel_size=1, worker_extension_cls=EXTENSION, distributed_executor_backend="mp"
    )
    graft = {GRAFT: {"toy": {}}} if asked else {}
    return SimpleNamespace(additional_config=graft, parallel_config=parallel)


def module(name: str, **attributes: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(attributes)
    return made


@pytest.fixture
def wiring(monkeypatch: pytest.MonkeyPatch) -> Wiring:
    log.warning_once.cache_clear()
    parts = {
        "vllm.v1.engine": {"EngineCoreOutputs": EngineOutputs},
        "vllm.v1.metrics.stats": {"SchedulerStats": Stats},
    }
    for name, attributes in parts.items():
        monkeypatch.setitem(sys.modules, name, module(name, **attributes))
    return Wiring([TOY], asked_for, EXTENSION)


class Core:
    """vLLM's ``EngineCoreProc``, when its scheduler is there."""

    def __init__(self, vllm_config: Any, *, log_stats: bool = True, fails: bool = False) -> None:
        self.vllm_config, self.log_stats, self.fails = vllm_config, log_stats, fails
        self.output_queue: queue.Queue[Any] = queue.Queue()
        outputs = {0: EngineOutputs(Stats())}
        self.scheduler = SimpleNamespace(update_from_output=lambda *given: outputs)
        self.ready = False

    def _initialize_effective_attention_block_size(self) -> None:
        self.ready = True

    def collective_rpc(self, method: str) -> list[Any]:
        assert method == "graft_states"
        if self.fails:
            raise RuntimeError("a worker's method is gone")
        return [{"on": ["toy"], "declined": {}}]


def started(wiring: Wiring, *given: Any, **options: Any) -> Core:
    class Hooked(Core):
        def _initialize_effective_attention_block_size(self) -> None:
            super()._initialize_effective_attention_block_size()

    wiring._hook_engine(module("core", EngineCore=Hooked))
    core = Hooked(*given, **options)
    core._initialize_effective_attention_block_size()
    assert core.ready
    return core


def test_the_states_go_to_the_first_api_server_before_any_step(wiring: Wiring) -> None:
    core = started(wiring, config())
    client, outputs = core.output_queue.get_nowait()
    assert client == 0
    sent = outputs.scheduler_stats.kv_connector_stats
    assert sent == {KEY: {"states": [["toy", "on", "toys"]]}}
    steps = core.scheduler.update_from_output(None, Output())
    assert steps[0].scheduler_stats.kv_connector_stats[KEY]["news"]["toy"]["seen"] == 1


@pytest.mark.parametrize(("asked", "log_stats"), [(False, True), (True, False)])
def test_nothing_changes_where_nobody_reads_or_asks(
    wiring: Wiring, asked: bool, log_stats: bool
) -> None:
    core = started(wiring, config(asked=asked), log_stats=log_stats)
    assert core.output_queue.empty()
    steps = core.scheduler.update_from_output(None, Output())
    assert steps[0].scheduler_stats.kv_connector_stats is None


def test_an_engine_starts_without_its_metrics(
    wiring: Wiring, caplog: pytest.LogCaptureFixture
) -> None:
    core = started(wiring, config(), fails=True)
    assert core.output_queue.empty()
    assert "no metrics in this process: RuntimeError: a worker's method is gone" in caplog.text


class Manager:
    """vLLM's ``StatLoggerManager``."""

    def __init__(self, vllm_config: Any, prometheus: Any = None) -> None:
        self.stat_loggers = [prometheus] if prometheus else []
        self.seen: list[Any] = []

    def record(self, scheduler_stats: Any, iteration_stats: Any, engine_idx: Any = None) -> None:
        self.seen.append(scheduler_stats.kv_connector_stats)


def managed(wiring: Wiring, vllm_config: Any, prometheus: Any = None) -> Manager:
    class Hooked(Manager):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)

        def record(self, *given: Any, **options: Any) -> None:
            super().record(*given, **options)

    wiring._hook_loggers(module("loggers", StatLoggerManager=Hooked, PrometheusStatLogger=Logger))
    return Hooked(vllm_config, prometheus=prometheus)


def message() -> Stats:
    return Stats(kv_connector_stats={KEY: {"news": {"toy": {"done": 2}}}})


def test_vllm_s_loggers_never_see_our_message(wiring: Wiring) -> None:
    prometheus = Logger(engines=2)
    manager = managed(wiring, config(), prometheus)
    manager.record(scheduler_stats=message(), iteration_stats=None, engine_idx=1)
    manager.record(message(), None)
    assert manager.seen == [None, None]
    assert total(prometheus.text, "vllm:graft_toy_done_total", engine="1") == 2
    assert total(prometheus.text, "vllm:graft_toy_done_total", engine="0") == 2


def test_nor_where_there_is_no_board(wiring: Wiring, caplog: pytest.LogCaptureFixture) -> None:
    """An engine that sends what its frontend does not expect must not stop that frontend."""
    manager = managed(wiring, config(asked=False))
    manager.record(message(), None)
    assert manager.seen == [None]
    assert caplog.text == ""
    broken = managed(wiring, config(), prometheus=None)
    broken.record(message(), None)
    assert broken.seen == [None]
    assert "no metrics in this process" in caplog.text


def test_a_worker_without_a_runner_goes_on(
    wiring: Wiring, caplog: pytest.LogCaptureFixture
) -> None:
    wiring.watch_worker(SimpleNamespace(), config())
    assert "no metrics in this process: AttributeError" in caplog.text
