"""Where worker, engine core and frontend are hooked for metrics. All hooks are inert in a process
whose configuration asks for none of our parts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from vllm_graft.base.decision import Decision
from vllm_graft.base.log import warning_once
from vllm_graft.base.metric import Metric, Origin
from vllm_graft.base.part import Part
from vllm_graft.base.values import reason_of
from vllm_graft.metrics.board import Board, taken_out
from vllm_graft.metrics.part_states import part_states
from vllm_graft.metrics.relay import KEY, Relay
from vllm_graft.metrics.worker_report import WorkerReport, report_now
from vllm_graft.seams.post_import import after_import
from vllm_graft.seams.wrap import after_scheduler, around

AskedFor = Callable[[Any], Sequence[tuple[Part, Any]]]
"""From a configuration, the parts that it asks for, each with its section."""

_ENGINE = "vllm.v1.engine.core"
_LOGGERS = "vllm.v1.metrics.loggers"
_BOARD = "vllm_graft_board"


class Wiring:
    """Hooks vLLM's processes. `asked_for` says which of all `parts` a configuration asks for, and
    `extension` names the worker extension that answers ``graft_states``."""

    def __init__(self, parts: Sequence[Part], asked_for: AskedFor, extension: str) -> None:
        self._parts, self._asked_for, self._extension = parts, asked_for, extension

    def install(self) -> None:
        after_import(_ENGINE, self._hook_engine)
        after_import(_LOGGERS, self._hook_loggers)

    def watch_worker(self, worker: Any, vllm_config: Any) -> None:
        """Let a worker that has loaded its model report what its parts count."""
        _unharmed(self._watch_worker, worker, vllm_config)

    def _watch_worker(self, worker: Any, vllm_config: Any) -> None:
        asks = self._asked_for(vllm_config) or Decision.from_vllm(vllm_config)
        if asks and not _is_local(vllm_config):
            WorkerReport().attach(worker.model_runner)

    # The engine core

    def _hook_engine(self, module: ModuleType) -> None:
        @after_scheduler(module.EngineCore)
        def then_relay(original: Any, core: Any) -> None:
            original(core)
            _unharmed(self._relay, core)

    def _relay(self, core: Any) -> None:
        config = core.vllm_config
        if not core.log_stats:
            return
        asked = self._asked_for(config)
        if not asked and Decision.from_vllm(config) is None:
            return
        sections = {part.name: section for part, section in asked}
        workers: list[Any] = []
        if config.parallel_config.worker_extension_cls == self._extension:
            workers = core.collective_rpc("graft_states")
        relay = Relay(
            {part.name: part.metrics for part, _ in asked},
            lambda found: part_states(self._parts, sections, config, found),
            workers,
            report_now if _is_local(config) else None,
        )
        relay.attach(core.scheduler)
        outbox = getattr(core, "output_queue", None)
        if outbox is not None and (message := relay.first_message()) is not None:
            from vllm.v1.engine import EngineCoreOutputs
            from vllm.v1.metrics.stats import SchedulerStats

            stats = SchedulerStats(kv_connector_stats={KEY: message})
            # To the first API server, with which each engine has a connection by then.
            outbox.put_nowait((0, EngineCoreOutputs(scheduler_stats=stats)))

    # The frontend

    def _hook_loggers(self, module: ModuleType) -> None:
        @around(module.StatLoggerManager, "__init__")
        def then_post(original: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
            original(manager, *args, **kwargs)
            config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
            _unharmed(self._post, manager, config, module.PrometheusStatLogger)

        @around(module.StatLoggerManager, "record")
        def take_first(original: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
            stats = args[0] if args else kwargs.get("scheduler_stats")
            board = getattr(manager, _BOARD, None)
            if board is None:
                taken_out(stats)
            else:
                board.record(stats, kwargs.get("engine_idx") or 0)
            original(manager, *args, **kwargs)

    def _post(self, manager: Any, vllm_config: Any, prometheus: type[Any]) -> None:
        asked = self._asked_for(vllm_config)
        if not asked and Decision.from_vllm(vllm_config) is None:
            return
        logger = next(each for each in manager.stat_loggers if isinstance(each, prometheus))
        rows = {part.name: counted_rows(part.metrics.rows, vllm_config) for part, _ in asked}
        setattr(manager, _BOARD, Board(rows, logger))
        for part, section in asked:
            if part.metrics.tell is not None:
                part.metrics.tell(section, list(_each_logger(manager.stat_loggers)))


def counted_rows(rows: Iterable[Metric], vllm_config: Any) -> list[Metric]:
    """The rows whose numbers come by way of the relay in an engine of this configuration."""
    staged = vllm_config.parallel_config.pipeline_parallel_size > 1
    elsewhere = {Origin.CONNECTOR, *([Origin.ENCODER] if staged else [])}
    return [row for row in rows if row.origin not in elsewhere]


def _is_local(vllm_config: Any) -> bool:
    """Whether the only worker lives in the engine core's process, as with one GPU."""
    return bool(vllm_config.parallel_config.distributed_executor_backend == "uni")


def _each_logger(loggers: Iterable[Any]) -> Iterable[Any]:
    for logger in loggers:
        of_engines: Mapping[int, Any] = getattr(logger, "per_engine_stat_loggers", {})
        yield from of_engines.values() or (logger,)


def _unharmed(do: Callable[..., None], *args: Any) -> None:
    """Do something for metrics, without which a server serves as well."""
    try:
        do(*args)
    except Exception as error:
        warning_once(f"vllm-graft has no metrics in this process: {reason_of(error)}")
