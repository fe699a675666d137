"""Random inputs of tree attention over latents."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_graft.spec_decode.attention.samples import random_masks
from vllm_graft.spec_decode.kernels.sizes import cdiv
from vllm_graft.spec_decode.trees.batch import LatentBatch


@dataclass(frozen=True)
class LatentShape:
    """Sizes of a problem.

    Attributes:
        rows: Tree rows of each request, 0 for one that the kernel must skip.
        prefixes: Keys before each tree.
        heads: Query heads.
        rank: Numbers of a latent.
        rope: Numbers of the rotated part.
        block_size: Slots per block.
        dtype: Dtype of the query, and of the latents unless ``fp8``.
        fp8: Whether the latents are e4m3, with a scale.
    """

    rows: tuple[int, ...]
    prefixes: tuple[int, ...]
    heads: int = 3
    rank: int = 32
    rope: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    fp8: bool = False


def latent_problem(
    shape: LatentShape, device: torch.device | str = "cpu", seed: int = 0
) -> LatentBatch:
    """A batch of random trees. Requests with an odd index have three more rows before their tree.

    Block 0 and all slots behind a request's last key hold NaN: reading them shows.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = [max(rows, 1) + 3 * (r % 2) for r, rows in enumerate(shape.rows)]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    masks = torch.zeros(int(starts[-1]), dtype=torch.int64)
    for end, rows in zip(starts[1:].tolist(), shape.rows):
        masks[end - rows : end] = random_masks(rows, generator)
    keys = [prefix + rows for prefix, rows in zip(shape.prefixes, shape.rows)]
    latents, table = _pages(shape, keys, generator)

    def query(width: int) -> torch.Tensor:
        # Head by head, as a batched product leaves it.
        values = torch.randn(shape.heads, len(masks), width, generator=generator)
        return values.to(device, shape.dtype).transpose(0, 1)

    return LatentBatch(
        query=query(shape.rank),
        query_rope=query(shape.rope + 8)[..., 8:],
        latents=latents.to(device),
        query_start_loc=starts.to(device, torch.int32),
        prefix_lens=torch.tensor(shape.prefixes, dtype=torch.int32, device=device),
        block_table=table.to(device),
        row_masks=masks.to(device),
        num_rows=torch.tensor(shape.rows, dtype=torch.int32, device=device),
        max_rows=max(shape.rows),
        max_seq_len=table.shape[1] * shape.block_size,
        scale=(shape.rank + shape.rope) ** -0.5,
        k_scale=torch.tensor(0.7, device=device) if shape.fp8 else None,
    )


def _pages(
    shape: LatentShape, keys: list[int], generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache and the block table; block 0 is the null block."""
    size = shape.block_size
    blocks = cdiv(max(*keys, 1), size)
    table = torch.randperm(len(keys) * blocks, generator=generator).view(len(keys), blocks) + 1
    cache = torch.randn(
        len(keys) * blocks + 1, size, shape.rank + shape.rope, generator=generator
    ).to(torch.float8_e4m3fn if shape.fp8 else shape.dtype)
    nan = torch.tensor(float("nan")).to(cache.dtype)
    cache.view(torch.uint8 if shape.fp8 else shape.dtype)[0] = (
        nan.view(torch.uint8) if shape.fp8 else nan
    )
    for row, length in zip(table, keys):
        used = cdiv(length, size)
        row[used:] = 0
        if length % size:
            tail = cache[row[used - 1], length % size :]
            tail.copy_(nan.expand(tail.shape))
    return cache, table.int()
