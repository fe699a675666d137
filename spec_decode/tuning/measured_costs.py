"""What steps cost, from when the workers have measured it until the scheduler is built.

vLLM builds the scheduler after the workers, in the same process and from the same configuration
object: that object says whose costs they are.
"""

from __future__ import annotations

from typing import Any

from vllm_graft.spec_decode.tuning.step_times import Costs

_kept: list[tuple[Any, Costs]] = []


def keep(vllm_config: Any, costs: Costs) -> None:
    """Keep the costs of an engine's steps; its earlier ones are forgotten."""
    take(vllm_config)
    _kept.append((vllm_config, costs))


def take(vllm_config: Any) -> Costs:
    """The costs that were kept for a configuration, once; empty if there are none."""
    for place, (owner, costs) in enumerate(_kept):
        if owner is vllm_config:
            del _kept[place]
            return costs
    return {}
