"""What metrics rely on. No part needs these rows: where one has moved, a server lacks numbers."""

from vllm_graft.seams.ledger.entry import seams

_STATS = "vLLM's SchedulerStats has a field for plugins"
_LOG = "vLLM's metrics of drafts know trees"

# Columns: path, kind, what is expected, why.
# fmt: off
METRICS = (
    *seams("metrics", _STATS, "v1.worker",
        ("gpu.async_utils.AsyncOutput", "has", "get_output, model_runner_output", "a step's result carries the worker's report"),
        ("gpu.async_utils.AsyncPoolingOutput", "has", "get_output, model_runner_output", "likewise, of a pooling model"),
        ("gpu_model_runner.AsyncGPUModelRunnerOutput", "has", "_model_runner_output, get_output", "likewise, of Model Runner V1"),
        ("gpu_model_runner.AsyncGPUPoolingModelRunnerOutput", "has", "_model_runner_output, get_output", "likewise"),
    ),
    *seams("metrics", _STATS, "v1.engine",
        ("core.EngineCore", "has", "_initialize_effective_attention_block_size(self, no other), collective_rpc, log_stats, model_executor, scheduler, vllm_config", "_initialize_effective_attention_block_size: wrapped: the first that a spawned process calls when there is a scheduler; whether anybody reads statistics; asks the workers which parts run; the harness finds an engine's runner"),
        ("core.EngineCoreProc", "has", "output_queue", "the parts' states go to the frontend before the first step"),
        ("EngineCoreOutputs", "has", "scheduler_stats", "a step's statistics, which our message goes with"),
    ),
    *seams("metrics", _STATS, "v1.metrics",
        ("stats.SchedulerStats", "has", "kv_connector_stats, num_running_reqs, num_waiting_reqs, spec_decoding_stats", "our message is an entry of kv_connector_stats; whether the engine is idle"),
        ("loggers.StatLoggerManager", "has", "stat_loggers, __init__(self, vllm_config, engine_idxs=, custom_stat_loggers=, enable_default_loggers=, aggregate_engine_logging=, client_count=), record(self, scheduler_stats, iteration_stats, mm_cache_stats=, engine_idx=)", "our series are made like those of vLLM's loggers; __init__: wrapped: our series are made after vLLM's; record: wrapped: our message is taken out before the loggers look"),
        ("loggers.PrometheusStatLogger", "has", "_counter_cls, _gauge_cls, _histogram_cls, per_engine_labelvalues, spec_decoding_prom", "classes and labels of our series; has vLLM's counters by position"),
        ("loggers.PrometheusStatLogger.__init__", "order", 'unregister_vllm_metrics(), labelnames = ["model_name", "engine"]', "our series come after it has dropped the older ones"),
        ("loggers.PerEngineStatLoggerAdapter", "has", "per_engine_stat_loggers", "finds the log lines of each engine"),
    ),
    *seams("metrics", _LOG, "v1",
        ("metrics.loggers.LoggingStatLogger", "has", "spec_decoding_logging", "its line on drafts is replaced for trees"),
        ("spec_decode.metrics.SpecDecodingLogging", "has", "accepted_tokens_per_pos_lists, last_log_time, num_accepted_tokens, num_draft_tokens, num_drafts, reset, log(self, log_fn=, no other)", "base of that line; log: overridden"),
        ("spec_decode.metrics.logger", "name", "present", "where the line goes"),
        ("spec_decode.metrics.SpecDecodingProm", "has", "counter_spec_decode_num_accepted_tokens_per_pos, observe", "counters by position: those deeper than trees are left out until they count"),
        ("spec_decode.metrics.SpecDecodingStats", "has", "num_accepted_tokens, num_accepted_tokens_per_pos, num_draft_tokens, num_drafts", "trees, nodes and depths of a step"),
        ("spec_decode.metrics.SpecDecodingStats.observe_draft", "order", "(self, num_draft_tokens, num_accepted_tokens), in range(num_accepted_tokens), self.num_accepted_tokens_per_pos[i] += 1", "counts accepted drafts by their place in the emitted row, which is a node's depth"),
        ("core.sched.scheduler.Scheduler.make_spec_decoding_stats", "order", "num_draft_tokens -= num_invalid_spec_tokens.get(", "drafts that a grammar refused do not count"),
    ),
)
