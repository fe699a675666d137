"""A copy engine on real streams, beside a few layers of KV."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.support.host_cache.submitted_loads import delay_loads, submit_load
from vllm_graft.hicache.copies.packed_pages import unfit
from vllm_graft.hicache.copies.strided import HostShard
from vllm_graft.hicache.host.pool import HostPool
from vllm_graft.hicache.messages.operation import CacheOperation, Direction, PoolTransfer
from vllm_graft.hicache.pages.host_form import FP8, PACKED, HostForm
from vllm_graft.hicache.pages.layout import group_layers, pages_bytes
from vllm_graft.hicache.pages.pool_shape import PAGE, PoolShape

BLOCKS, LAYERS, SLOTS = 64, 8, 32
DELAY = 20_000_000
"""A delay in clock cycles, about 10 ms."""


class GpuRig:
    """KV of some layers in one allocation, and host memory for its pages."""

    def __init__(
        self,
        order: str,
        delay: int = 0,
        dtype: torch.dtype = torch.float32,
        form: HostForm | None = None,
        driver: Any = None,
        ring: Any = None,
    ) -> None:
        self.order = order
        sizes = {"L": LAYERS, "B": BLOCKS, "H": 4, "N": 16, "C": 64}
        shape = [sizes[axis] for axis in order]
        whole = torch.zeros(shape, device="cuda", dtype=dtype)
        views = whole.permute([order.index(axis) for axis in "LBHNC"])
        self._start(
            {f"layers.{n}.attn": views[n] for n in range(LAYERS)}, delay, form, driver, ring
        )

    @classmethod
    def of(cls, caches: dict[str, torch.Tensor], form: HostForm | None) -> GpuRig:
        rig = cls.__new__(cls)
        rig._start(caches, 0, form, None)
        return rig

    def _start(
        self,
        caches: dict[str, torch.Tensor],
        delay: int,
        form: HostForm | None,
        driver: Any,
        ring: Any = None,
    ) -> None:
        from vllm_graft.hicache.copies import fp8_kernel, packed_kernel
        from vllm_graft.hicache.copies.streams import StreamCopyEngine

        self.caches = caches
        dtype = next(iter(caches.values())).dtype
        pools = {0: group_layers(list(caches), caches, BLOCKS, form)}
        self.page = pages_bytes(pools[0])
        self.pool = HostPool(PoolShape.fit(SLOTS * max(PAGE, self.page), self.page, 1))
        self.pool.pin(0)
        shard = HostShard.of(self.pool, 0)
        options: dict[str, Any] = {"strided": driver, "ring": ring}
        if form is FP8:
            options["convert"] = partial(fp8_kernel.convert_runs, dtype)
        elif form is PACKED:
            options |= {"convert": packed_kernel.convert_runs, "unfit": unfit}
        self.engine = StreamCopyEngine(pools, shard, **options)
        if delay:
            delay_loads(self.engine, delay)

    def slot(self, number: int) -> torch.Tensor:
        page = self.pool.page(0, number, self.page)
        return torch.frombuffer(page, dtype=torch.float32)

    def operation(self, way: Direction, slots: list[int], blocks: list[int]) -> CacheOperation:
        return CacheOperation([0], way, [PoolTransfer(0, slots, blocks)])

    def load(self, way: str, slots: list[int], blocks: list[int]) -> None:
        """Load pages in a step of their own, one way of `LOAD_WAYS`, and wait for them."""
        self.engine.begin_step()
        submit_load(self.engine, way, self.operation(Direction.LOAD, slots, blocks))
        if way == "layers":
            assert self.engine.wait_all_layers() == LAYERS
        self.engine.drain()
        torch.cuda.synchronize()

    def close(self) -> None:
        self.engine.drain()
        torch.cuda.synchronize()
        self.pool.unpin()
