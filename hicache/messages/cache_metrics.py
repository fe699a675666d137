"""What the host KV cache counts. vLLM collects it as the statistics of a KV connector."""

import functools

from vllm_graft.base.metric import Kind, Metric, Origin, PartMetrics

_counter = functools.partial(Metric, kind=Kind.COUNTER, origin=Origin.CONNECTOR)
_gauge = functools.partial(Metric, kind=Kind.GAUGE, origin=Origin.CONNECTOR)

METRICS = PartMetrics(
    (
        _counter("load_bytes", help="Bytes copied from host to device."),
        _counter("load_strided_bytes", help="Bytes loaded by 2D copies straight to their blocks."),
        _counter("load_staged_bytes", help="Bytes loaded by way of staging memory."),
        _counter("load_seconds", help="Time of loads, in seconds, as far as they were timed."),
        _counter("store_bytes", help="Bytes copied from device to host."),
        _counter("store_strided_bytes", help="Bytes stored by 2D copies."),
        _counter("store_seconds", help="Time of stores, in seconds."),
        _counter("hit_tokens_host", help="Tokens whose KV came from host memory."),
        _counter("hit_tokens_storage", help="Tokens whose KV came from storage."),
        _counter("loads_async", help="Requests that were loaded whole before they ran."),
        _counter("loads_layerwise", help="Requests that were loaded during their first step."),
        _counter("recomputed", help="Requests that had a hit and recomputed it, by cost."),
        _counter("evictions", help="Pages that this engine evicted from host memory."),
        _counter("hit_pages_of_others", help="Loaded pages that another server has written."),
        _counter("lock_waits", help="Waits for the lock of shared host memory."),
        _counter("lock_timeouts", help="Waits that were given up, so that nothing was found."),
        _counter("reaped_engines", help="Dead engines whose slots this one gave back."),
        _counter("declined_stores", help="Stores that were given up for want of host memory."),
        _counter("failed_loads", help="Loads that failed."),
        _counter("failed_stores", help="Stores that failed."),
        _counter("unfit_pages", help="Pages that did not fit into `packed`."),
        _counter("unwaited_layers", help="Layers that were waited for after the forward pass."),
        _counter("prefetched_pages", help="Pages read from storage."),
        _counter("prefetch_timeouts", help="Prefetches that were cut by their deadline."),
        _counter("written_pages", help="Pages written to storage."),
        _counter("declined_writes", help="Pages that storage had no bandwidth or room for."),
        _counter("dropped_writes", help="Pages that were not written, as a reset came first."),
        _counter(
            "storage_errors", help="Lookups, reads, writes and flushes of storage that failed."
        ),
        _gauge("pages", help="Pages in host memory."),
        _gauge("free_pages", help="Free slots in host memory."),
        _gauge("sharing_engines", help="Engines that share host memory, this one included."),
        _gauge("jobs", help="Copies in flight."),
        _gauge("write_queue", help="Pages that wait to be written to storage."),
        _gauge(
            "learned_load_bytes_per_second",
            help="Rate from host to device that the choice of a load reckons with.",
        ),
        _gauge("learned_prefill_tokens_per_second", help="Rate of prefill that it reckons with."),
        _gauge("learned_step_seconds", help="Length of a step that it reckons with, in seconds."),
    )
)
