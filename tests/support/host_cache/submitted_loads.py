"""The three ways of a load through a copy engine, and loads that are late."""

from typing import Any

import torch

from vllm_graft.hicache.copies.copy_engine import CopyEngine
from vllm_graft.hicache.messages.operation import CacheOperation, Direction

LOAD_WAYS = ("async", "whole", "layers")


def submit_load(engine: CopyEngine, way: str, load: CacheOperation) -> None:
    """Submit a load in one of the ways, without waiting for it afterwards."""
    if way == "async":
        engine.load(load)
    elif way == "whole":
        engine.load_now(load)
    else:
        engine.load_layers(load, first=())


def delay_loads(engine: Any, cycles: int) -> None:
    """Delay each load on real streams by cycles of the GPU's clock, to find races."""
    begin = engine._begin

    def begin_late(direction: Direction) -> Any:
        start = begin(direction)
        if direction is Direction.LOAD:
            torch.cuda._sleep(cycles)
        return start

    engine._begin = begin_late
