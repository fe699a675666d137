"""Counters of the host KV cache: to vLLM's log line, to Prometheus and to ``graft_info``."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

COUNTERS = {
    "load_bytes": "bytes copied from host to device",
    "load_strided_bytes": "of these, bytes by 2D copies straight to their blocks",
    "load_staged_bytes": "of load_bytes, bytes by way of staging memory",
    "load_seconds": "seconds that these copies took, as far as they were timed",
    "store_bytes": "bytes copied from device to host",
    "store_strided_bytes": "of these, bytes by 2D copies",
    "store_seconds": "seconds that these copies took",
    "hit_tokens_host": "tokens whose KV came from host memory",
    "hit_tokens_storage": "tokens whose KV came from storage",
    "loads_async": "requests that were loaded whole before they ran",
    "loads_layerwise": "requests that were loaded during their first step",
    "recomputed": "requests that had a hit and recomputed, by cost",
    "evictions": "pages evicted from host memory",
    "declined_stores": "stores given up for want of host memory",
    "failed_loads": "loads that failed",
    "failed_stores": "stores that failed",
    "unwaited_layers": "layers that were waited for after the forward pass",
    "prefetched_pages": "pages read from storage",
    "prefetch_timeouts": "prefetches cut by their deadline",
    "written_pages": "pages written to storage",
    "declined_writes": "pages not written for want of storage bandwidth or room",
    "dropped_writes": "pages not written, as a reset came first",
    "storage_errors": "reads, writes and flushes of storage that failed",
}
GAUGES = {
    "pages": "pages in host memory",
    "free_pages": "free slots in host memory",
    "jobs": "copies in flight",
    "write_queue": "pages that wait to be written to storage",
    "learned_load_gbps": "GB/s from host to device that the choice of a load reckons with",
    "learned_prefill_tokens_per_second": "prefill rate that it reckons with",
    "learned_step_seconds": "length of a step that it reckons with",
}


class HiCacheStats(KVConnectorStats):
    """Counters since the last report (added up), and gauges (the latest counts)."""

    def reset(self) -> None:
        """Forget everything."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> HiCacheStats:
        """Add another report."""
        for name, value in other.data.items():
            if name in GAUGES:
                self.data[name] = value
            else:
                self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """What is worth a line in the log."""
        shown: dict[str, int | float] = {
            name: round(value, 3) for name, value in self.data.items() if value
        }
        # Not so for loads: of those within a step not all are timed.
        if seconds := self.data.get("store_seconds", 0):
            shown["store_GBps"] = round(self.data["store_bytes"] / seconds / 1e9, 2)
        return shown

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.get(name) for name in COUNTERS)

    def add(self, name: str, amount: float = 1) -> None:
        """Count."""
        self.data[name] = self.data.get(name, 0) + amount


class HiCacheProm(KVConnectorPromMetrics):
    """``vllm:graft_hicache_*``, one series an engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labels: Any, values: Any) -> None:
        super().__init__(vllm_config, metric_types, labels, values)
        self._series: dict[str, dict[int, Any]] = {}
        for names, factory in ((COUNTERS, self._counter_cls), (GAUGES, self._gauge_cls)):
            for name, meaning in names.items():
                metric = factory(
                    name=f"vllm:graft_hicache_{name}",
                    documentation=f"Host KV cache: {meaning}.",
                    labelnames=labels,
                )
                self._series[name] = {
                    engine: metric.labels(*label) for engine, label in values.items()
                }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one report."""
        for name, value in transfer_stats_data.items():
            series = self._series.get(name, {}).get(engine_idx)
            if series is None:
                continue
            if name in GAUGES:
                series.set(value)
            elif value:
                series.inc(value)
