"""Hands what an engine's workers measured of its steps to the scheduler's tuner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_graft.base.log import info_once
from vllm_graft.spec_decode.tuning import measured_costs

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

    from vllm_graft.spec_decode.tuning.step_times import Costs


def step_costs(worker: Any) -> dict[int, dict[int, float]]:
    """Runs in each worker; see `measure_step_costs`, which the engine's process does not import."""
    from vllm_graft.spec_decode.drafters.step_costs import measure_step_costs

    costs: dict[int, dict[int, float]] = measure_step_costs(worker)
    return costs


def measure(engine: EngineCore) -> Costs:
    """Ask an engine's workers, which have captured their graphs, what each size costs.

    The answer is kept for the scheduler of the same configuration, which is not built yet.
    """
    measured: list[dict[int, dict[int, float]]] = engine.collective_rpc(step_costs)
    # A step takes as long as its slowest rank; all have the same sizes.
    slowest = {
        nodes: {count: max(each[nodes][count] for each in measured) for count in counts}
        for nodes, counts in measured[0].items()
    }
    measured_costs.keep(engine.vllm_config, slowest)
    info_once(f"vllm-graft measured steps of {sum(map(len, slowest.values()))} captured sizes")
    return slowest
