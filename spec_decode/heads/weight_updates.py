"""Copies of a draft's output head follow weights that change while an engine serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_graft.seams.wrap import wrap


def follow_weights(worker: Any) -> None:
    """Let a worker that has loaded its model renew the copies whenever weights were replaced.

    A draft that shares the target's head gets the new one from vLLM. Drafts by copies of the old
    one's rows would be accepted less often. The worker's speculator may be another's, without such
    a head.
    """
    head = getattr(worker.model_runner.speculator, "head", None)
    renew: Callable[[], None] | None = getattr(head, "renew", None)
    if renew is None:
        return

    def then_renew(original: Callable[..., Any]) -> Callable[..., Any]:
        def replace_weights(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            renew()
            return result

        return replace_weights

    wrap(worker.model_runner, "reload_weights", then_renew)
    # A trainer that sends weights goes past the model runner.
    wrap(worker, "finish_weight_update", then_renew)
