"""Hands what an engine's workers measured of its steps to the scheduler's tuner."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm_graft.base.log import info_once, warning_once
from vllm_graft.seams.ranks import gather_replicas
from vllm_graft.spec_decode.heads.hot_vocabulary import HotGains
from vllm_graft.spec_decode.tuning.step_times import MEASURED, Costs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.engine.core import EngineCore

    from vllm_graft.spec_decode.drafters.step_costs import StepCosts

REPLAYS = 3
"""Replays per graph of the first pass. The fastest counts: the first one also uploads the graph."""

DISTURBED = 0.1
"""Part of a cost by which a pass must be below those before it for these to count as disturbed."""

PATIENCE = 10.0
"""Seconds after which no further pass begins."""

Measured = tuple["StepCosts", "StepCosts", float]
"""Costs from the whole vocabulary and from hot tokens, and the seconds that measuring has taken."""


def step_costs(worker: Any, replays: int, seconds: float) -> Measured:
    """Runs in each worker; see `measure_step_costs`, which the engine's process does not import.
    Data-parallel ranks replay passes of all of them. So they all return the slowest rank's costs
    and seconds, by which each decides to measure again."""
    from vllm_graft.spec_decode.drafters.step_costs import measure_step_costs

    measured: tuple[StepCosts, StepCosts] = measure_step_costs(worker, replays)
    return _slowest_of(gather_replicas((*measured, seconds)))


def hot_gains(worker: Any, whole: Costs, hot: Costs) -> None:
    """Let hot tokens be used by what they save. Runs in each worker; all of them have to be told
    the same costs."""
    worker.model_runner.speculator.head.learned.least = HotGains(whole, hot).least


def measure(engine: EngineCore) -> Costs:
    """Ask an engine's workers, which have captured their graphs, what each size costs.

    Another process on the GPU makes a measured step longer, and never shorter. So all sizes are
    measured again until a pass finds none that is clearly shorter than before, and each one's
    shortest time counts. Where a vocabulary is learned, the workers are told what drafting from it
    saves. The answer is kept for the scheduler of the same configuration, which is not built yet.
    """
    began = time.monotonic()
    whole, hot, _ = _slowest_ranks(engine, REPLAYS, 0.0)
    while True:
        again, again_hot, seconds = _slowest_ranks(engine, 1, time.monotonic() - began)
        if not (shorter := _lower(whole, again) + _lower(hot, again_hot)):
            break
        if seconds > PATIENCE:
            warning_once(
                f"vllm-graft measured what steps cost for {PATIENCE:.0f} s "
                f"while something else used the GPU: the last pass still found {shorter} sizes "
                f"shorter by {DISTURBED:.0%} or more. Start the engine while the GPU is free if "
                "graft.tree.shape auto chooses badly"
            )
            break
    costs: Costs = whole
    if hot:
        engine.collective_rpc(hot_gains, args=(whole, hot))
        costs = HotGains(whole, hot).expected()
    MEASURED.keep(engine.vllm_config, costs)
    info_once(f"vllm-graft measured steps of {sum(map(len, costs.values()))} captured sizes")
    return costs


def _slowest_ranks(engine: EngineCore, replays: int, seconds: float) -> Measured:
    ranks: list[Measured] = engine.collective_rpc(step_costs, args=(replays, seconds))
    return _slowest_of(ranks)


def _slowest_of(ranks: Sequence[Measured]) -> Measured:
    whole, hot, seconds = zip(*ranks, strict=True)
    return _slowest(whole), _slowest(hot), max(seconds)


def _slowest(ranks: Sequence[Costs]) -> StepCosts:
    return {
        nodes: {count: max(each[nodes][count] for each in ranks) for count in counts}
        for nodes, counts in ranks[0].items()
    }


def _lower(costs: StepCosts, again: StepCosts) -> int:
    """Lower costs in place to those of another pass; return how many were clearly too high."""
    disturbed = 0
    for nodes, counts in again.items():
        for count, seconds in counts.items():
            disturbed += seconds < (1 - DISTURBED) * costs[nodes][count]
            costs[nodes][count] = min(costs[nodes][count], seconds)
    return disturbed
