"""What the two kernels of tree attention over latents (MLA) are timed with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from vllm_graft.spec_decode.kernels.attention.workspace import AttentionWorkspace
from vllm_graft.spec_decode.kernels.sizes import cdiv
from vllm_graft.spec_decode.targets.dense.choice import KernelChoice, KernelName, Point
from vllm_graft.spec_decode.targets.dense.samples import random_masks
from vllm_graft.spec_decode.targets.dense.two_pass import TwoPass
from vllm_graft.spec_decode.targets.latent.latent_attention import latent_attention
from vllm_graft.spec_decode.targets.latent.latent_two_pass import LATENT_PASSES
from vllm_graft.spec_decode.trees.batch import LatentBatch

_CACHE_BYTES = 256 << 20
"""Bytes of latents in a measurement. Longer contexts share blocks."""


class LatentGeometry(NamedTuple):
    """What attention's time depends on besides the batch, of one rank."""

    num_heads: int
    rank: int
    rope: int
    dtype: torch.dtype
    block_size: int

    @property
    def most_keys(self) -> int:
        """Keys of all requests above which a point is left out: 128 heads take long over more."""
        return 1 << 18

    @property
    def calls_timed(self) -> int:
        """Calls in a graph that is timed."""
        return 2

    @classmethod
    def of(cls, layer: Any, dtype: torch.dtype, block_size: int) -> LatentGeometry:
        sizes = (len(layer.W_UK_T), layer.kv_lora_rank, layer.qk_rope_head_dim)
        return cls(*sizes, dtype, block_size)

    def problem(self, point: Point, device: torch.device | str) -> LatentBatch:
        """A batch of random trees, all with ``point.rows`` rows."""
        keys = max(point.context, point.rows)
        rows, width = point.num_reqs * point.rows, self.rank + self.rope
        block_bytes = self.block_size * width * self.dtype.itemsize
        per_request = cdiv(keys, self.block_size)
        blocks = max(1, min(point.num_reqs * per_request, _CACHE_BYTES // block_bytes))
        generator = torch.Generator().manual_seed(0)
        masks = random_masks(point.rows, generator).repeat(point.num_reqs)

        def drawn(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, device=device, dtype=self.dtype)

        def filled(value: int) -> torch.Tensor:
            return torch.full((point.num_reqs,), value, dtype=torch.int32, device=device)

        table = torch.randint(blocks, (point.num_reqs, per_request), generator=generator)
        return LatentBatch(
            query=drawn(rows, self.num_heads, self.rank),
            query_rope=drawn(rows, self.num_heads, self.rope),
            latents=drawn(blocks, self.block_size, width),
            query_start_loc=torch.arange(0, rows + 1, point.rows, dtype=torch.int32, device=device),
            prefix_lens=filled(keys - point.rows),
            block_table=table.to(device, torch.int32),
            row_masks=masks.to(device),
            num_rows=filled(point.rows),
            max_rows=point.rows,
            max_seq_len=keys,
            scale=width**-0.5,
        )

    def lengthen(self, batch: LatentBatch, keys: int) -> None:
        """Give each request so many keys, its tree's among them."""
        batch.prefix_lens.fill_(keys - batch.max_rows)

    def calls(
        self, batch: LatentBatch, workspace: AttentionWorkspace, longest: int
    ) -> dict[KernelName, Callable[[], None]]:
        """A call of each kernel, for graphs whose requests have up to `longest` keys.

        The kernel that is the only one gets zeros to write to, as in a layer.
        """
        batch = replace(batch, max_seq_len=longest)
        both, metadata = TwoPass(KernelChoice("flash"), LATENT_PASSES), object()
        multiprocessors = workspace.multiprocessors

        def alone() -> None:
            latent_attention(batch, torch.zeros_like(batch.query), workspace=workspace)

        def passes() -> None:
            both.attend(batch, None, metadata, multiprocessors=multiprocessors)

        return {"triton": alone, "flash": passes}
