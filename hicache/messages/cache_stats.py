"""Counters of the host KV cache, for vLLM's log line, Prometheus and ``graft_info``."""

from typing import Any, Self

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from vllm_graft.base.metric import PREFIX, Kind, Series
from vllm_graft.hicache.messages.cache_metrics import METRICS

COUNTERS = {row.name: row for row in METRICS.rows if row.kind is Kind.COUNTER}
GAUGES = {row.name: row for row in METRICS.rows if row.kind is Kind.GAUGE}


class HiCacheStats(KVConnectorStats):
    """Counters and gauges of one interval. Reports add up counters and keep the latest gauges."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> Self:
        for name, value in other.data.items():
            if name in GAUGES:
                self.data[name] = value
            else:
                self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The values for vLLM's log line: all that are not zero, and the rate of stores."""
        shown: dict[str, int | float] = {
            name: round(value, 3) for name, value in self.data.items() if value
        }
        # Loads get no rate, because not all loads within a step are timed.
        if seconds := self.data.get("store_seconds", 0):
            shown["store_GBps"] = round(self.data["store_bytes"] / seconds / 1e9, 2)
        return shown

    def is_empty(self) -> bool:
        return not any(self.data.get(name) for name in COUNTERS)

    def add(self, name: str, amount: float = 1) -> None:
        self.data[name] = self.data.get(name, 0) + amount


class HiCacheProm(KVConnectorPromMetrics):
    """The Prometheus metrics ``vllm:graft_hicache_*``, with one series per engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labels: Any, values: Any) -> None:
        super().__init__(vllm_config, metric_types, labels, values)
        self._series = {
            row.name: Series(row, f"{PREFIX}hicache_{row.name}", self) for row in METRICS.rows
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in self._series:
                self._series[name].take(engine_idx, value)
