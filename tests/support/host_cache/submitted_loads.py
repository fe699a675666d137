"""The three ways of a load through a copy engine."""

from vllm_graft.hicache.copies.copy_engine import CopyEngine
from vllm_graft.hicache.messages.operation import CacheOperation

LOAD_WAYS = ("async", "whole", "layers")


def submit_load(engine: CopyEngine, way: str, load: CacheOperation) -> None:
    """Submit a load in one of the ways, without waiting for it afterwards."""
    if way == "async":
        engine.load(load)
    elif way == "whole":
        engine.load_now(load)
    else:
        engine.load_layers(load, first=())
