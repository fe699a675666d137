"""Room for prompts that vLLM computes whole, where it doesn't serve them in chunks."""

from __future__ import annotations

from typing import Any

from vllm_graft.base.options import target_of


def make_room(vllm_config: Any) -> None:
    """Let a step of MLA on a CPU hold the longest prompt, unless the user said how much it holds.

    vLLM turns chunks off there and raises ``max_num_batched_tokens`` to ``max_model_len``. Beside
    drafts it has by then derived ``max_num_scheduled_tokens`` from the smaller number, so that a
    longer prompt would wait forever. The larger one is harmless if chunks are on after all: the
    scheduler takes the least of both.
    """
    from vllm.platforms import current_platform

    scheduler, target = vllm_config.scheduler_config, target_of(vllm_config)
    given = scheduler.max_num_scheduled_tokens is not None
    if given or target is None or not target.use_mla or current_platform.device_type != "cpu":
        return
    scheduler.max_num_scheduled_tokens = max(scheduler.max_num_batched_tokens, target.max_model_len)
