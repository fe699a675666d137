"""GB/s of our copies between pinned host memory and the device, beside plain memcpy.

The cache has the shape of Llama-3.1-8B: 32 layers, 64 KiB of K and V per layer for a block of 16
tokens. There are three orders of blocks and slots. Either both are in random order, as after a
while of serving, so that nothing merges by luck. Or runs of both are in random order, as a prompt
of 8k tokens (512 blocks) or of 512 tokens (32 blocks) has them while nothing is scattered. Or slots
are in runs and blocks are not: blocks descend, as vLLM hands out every other prefix, or lie
anywhere.
"""

from __future__ import annotations

import random
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from typing import Any

import torch

from vllm_graft.hicache.config.cache_config import STAGING_BYTES
from vllm_graft.hicache.copies.copy_engine import CopyEngine, HostShard, MemoryCopyEngine
from vllm_graft.hicache.copies.fp8_copy import memory_copy
from vllm_graft.hicache.host.pool import HostPool
from vllm_graft.hicache.messages.operation import CacheOperation, Direction, PoolTransfer
from vllm_graft.hicache.pages.layout import group_layers
from vllm_graft.hicache.pages.pool_shape import PoolShape

Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """The shape of a KV cache, and how much of it is copied.

    Attributes:
        layers: layers of the model.
        page_bytes: bytes of a layer's part of a block.
        blocks: blocks that one operation copies; the cache has twice as many.
        at_once: operations that are submitted before waiting.
        repeats: number of measurements; their median counts.
    """

    layers: int = 32
    page_bytes: int = 64 << 10
    blocks: int = 512
    at_once: int = 4
    repeats: int = 5

    @property
    def bytes(self) -> int:
        """Bytes of one operation."""
        return self.layers * self.page_bytes * self.blocks


def measure(device: str, tiny: bool) -> list[Row]:
    """Measure memcpy and our engine: scattered blocks and runs, layouts of the KV cache, fp8.

    ``layers`` is a load of one layer at a time, as within a step. ``*_ms`` is the launching
    thread's time to submit one operation, ``strided`` the share of bytes by 2D copies straight to
    their place, and ``staged`` the share of loads by way of staging memory.
    """
    shape = Shape(layers=4, page_bytes=4096, blocks=16, repeats=2) if tiny else Shape()
    best = memcpy(device, shape)
    rows: list[Row] = [{"what": "memcpy", **best}]
    cases = [(fp8, layout, 1, "") for fp8, layout in product((False, True), ("LBHNC", "BLHNC"))]
    cases += [(False, "LBHNC", run, "") for run in (shape.blocks, shape.blocks // 16) if run > 1]
    cases += [(False, "LBHNC", shape.blocks, order) for order in ("reversed", "random")]
    for fp8, layout, run, order in cases:
        found = engine(device, shape, layout, fp8, run, order)
        compared = {"h2d": "h2d", "d2h": "d2h", "both": "both", "layers": "h2d"}
        shares = {f"{key}_share": found[key] / best[to] for key, to in compared.items()}
        name = "engine" + " fp8" * fp8 + " BLHNC" * (layout == "BLHNC")
        name += f" runs of {run}" * (run > 1) + f", blocks {order}" * bool(order)
        rows.append({"what": name, **found, **shares})
    return rows


def serve(pipe: Connection, device: str, tiny: bool) -> None:
    """Measure in a process of its own, and send the rows."""
    try:
        pipe.send(measure(device, tiny))
    except Exception as error:
        traceback.print_exc()
        pipe.send([{"what": "engine", "error": f"{type(error).__name__}: {error}"}])


def rates(device: str, shape: Shape, load: Callable[[], None], store: Callable[[], None]) -> Row:
    """Return GB/s of each direction alone and of both together (the sum), and the launching
    thread's ms per operation."""

    def both() -> None:
        load()
        store()

    return {
        **_rate(device, shape, "h2d", load, shape.bytes),
        **_rate(device, shape, "d2h", store, shape.bytes),
        **_rate(device, shape, "both", both, 2 * shape.bytes),
    }


def _rate(
    device: str, shape: Shape, name: str, submit: Callable[[], None], num_bytes: int
) -> dict[str, float]:
    found, submitted = [], []
    for repeat in range(shape.repeats + 1):
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(shape.at_once):
            submit()
        end = time.perf_counter()
        _synchronize(device)
        if repeat:
            submitted.append((end - start) / shape.at_once * 1e3)
            found.append(shape.at_once * num_bytes / (time.perf_counter() - start) / 1e9)
    return {name: statistics.median(found), f"{name}_ms": statistics.median(submitted)}


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def memcpy(device: str, shape: Shape) -> Row:
    """Measure the most that this machine can do: contiguous pinned copies of all bytes at once."""
    pin = device == "cuda"
    hosts = [torch.ones(shape.bytes, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
    devices = [torch.ones(shape.bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream() if pin else None for _ in range(2)]

    def load() -> None:
        with torch.cuda.stream(streams[0]):
            devices[0].copy_(hosts[0], non_blocking=True)

    def store() -> None:
        with torch.cuda.stream(streams[1]):
            hosts[1].copy_(devices[1], non_blocking=True)

    return rates(device, shape, load, store)


def engine(
    device: str, shape: Shape, layout: str, fp8: bool = False, run: int = 1, order: str = ""
) -> Row:
    """Measure our engine on a KV cache whose layers (LBHNC) or blocks (BLHNC) are outermost.

    The rates leave out the cost of the first use, and the copied bytes are compared first. Where
    the host keeps bfloat16 as fp8, half the bytes cross the link, and only these are counted.
    ``run`` blocks follow each other, and their slots do too. With an ``order`` only the slots do;
    blocks are ``"reversed"`` or ``"random"``.
    """
    names = [f"model.layers.{layer}.self_attn" for layer in range(shape.layers)]
    total = 2 * shape.blocks
    if layout == "LBHNC":
        cache = torch.zeros(shape.layers, total, shape.page_bytes, dtype=torch.uint8, device=device)
        views = {name: cache[layer] for layer, name in enumerate(names)}
    else:
        cache = torch.zeros(total, shape.layers, shape.page_bytes, dtype=torch.uint8, device=device)
        views = {name: cache[:, layer] for layer, name in enumerate(names)}
    if fp8:
        views = {name: view.view(torch.bfloat16) for name, view in views.items()}
    pools = {0: group_layers(names, views, total, 1 if fp8 else None)}
    pool = HostPool(PoolShape(total, shape.layers * shape.page_bytes // (1 + fp8), 1))
    try:
        copier = _copier(device, pools, pool, fp8)
        load, store = _operations(shape, run, order)

        def layers() -> None:
            copier.load_layers(load, ())
            copier.wait_all_layers()

        found = rates(device, shape, lambda: copier.load(load), lambda: copier.store(store))
        found |= _rate(device, shape, "layers", layers, shape.bytes)
        found = {key: n if key.endswith("_ms") else n / (1 + fp8) for key, n in found.items()}
        done = copier.finished()
        loads = [one for one in done if one.operation.direction is Direction.LOAD]
        strided = sum(one.strided_bytes for one in done) / sum(one.num_bytes for one in done)
        staged = sum(one.staged_bytes for one in loads) / sum(one.num_bytes for one in loads)
        _check(copier, views, shape, load, store)
        return found | {"strided": strided, "staged": staged}
    finally:
        _synchronize(device)
        pool.close()


def _copier(device: str, pools: Any, pool: HostPool, fp8: bool) -> CopyEngine:
    shard = HostShard.of(pool, 0)
    if device != "cuda":
        convert = partial(memory_copy, torch.bfloat16) if fp8 else None
        return MemoryCopyEngine(pools, shard, convert=convert)
    from vllm_graft.hicache.copies.cuda_driver import CudaDriver
    from vllm_graft.hicache.copies.fp8_kernel import convert_runs
    from vllm_graft.hicache.copies.staging_ring import StagingRing
    from vllm_graft.hicache.copies.streams import StreamCopyEngine

    pool.pin(0)
    convert = partial(convert_runs, torch.bfloat16) if fp8 else None
    # There is no fallback here: without 2D copies the rows would be of something else.
    strided = CudaDriver.load(torch.cuda.current_device())
    ring = None if fp8 else StagingRing.allocate(STAGING_BYTES)
    return StreamCopyEngine(pools, shard, convert=convert, strided=strided, ring=ring)


def _operations(
    shape: Shape, run: int = 1, order: str = ""
) -> tuple[CacheOperation, CacheOperation]:
    """Make a load and a store of different blocks and slots, in runs."""
    source = random.Random(0)
    firsts = range(0, 2 * shape.blocks, run)
    blocks, slots = (
        [first + at for first in source.sample(firsts, len(firsts)) for at in range(run)]
        for _ in range(2)
    )
    half = shape.blocks
    if order == "random":
        source.shuffle(blocks)
    elif order == "reversed":
        blocks.reverse()
    return (
        CacheOperation([0], Direction.LOAD, [PoolTransfer(0, slots[:half], blocks[:half])]),
        CacheOperation([1], Direction.STORE, [PoolTransfer(0, slots[half:], blocks[half:])]),
    )


def _check(
    copier: CopyEngine,
    views: dict[str, torch.Tensor],
    shape: Shape,
    load: CacheOperation,
    store: CacheOperation,
) -> None:
    """Check that bytes which are stored, and loaded into other blocks, are the same."""
    stored, back = store.transfers[0], load.transfers[0]
    for layer, view in enumerate(views.values()):
        fp8 = view.dtype is torch.bfloat16
        # Codes below 127 are finite numbers of e4m3, which fp8 keeps exactly.
        codes = (
            torch.arange(view.shape[1], device=view.device) * (layer + 3) % (127 if fp8 else 251)
        )
        values = codes.to(torch.uint8)
        if fp8:
            values = values.view(torch.float8_e4m3fn).to(view.dtype)
        view[stored.device_indices] = values
    copier.begin_step()
    copier.store(store)
    copier.drain()
    copier.begin_step()
    loaded = PoolTransfer(0, stored.host_indices, back.device_indices)
    copier.load(CacheOperation([2], Direction.LOAD, [loaded]))
    copier.drain()
    for view in views.values():
        if not torch.equal(view[stored.device_indices], view[back.device_indices]):
            raise RuntimeError("the copy engine did not bring the bytes back that it stored")
