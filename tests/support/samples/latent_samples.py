"""Random inputs of attention over latents, of trees to verify and of a draft's levels."""

from dataclasses import dataclass, replace

import torch

from tests.support.samples.attention_samples import random_trees
from vllm_graft.spec_decode.kernels.kernel_launch import cdiv
from vllm_graft.spec_decode.trees.batch import LatentBatch, LatentDraftBatch


@dataclass(frozen=True)
class LatentShape:
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
    starts, masks = random_trees(shape.rows, generator)
    keys = [prefix + rows for prefix, rows in zip(shape.prefixes, shape.rows)]
    latents, table = _pages(shape, keys, generator)
    return LatentBatch(
        **_queries(shape, len(masks), generator, device),
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


def with_padding(batch: LatentBatch, rows: int) -> LatentBatch:
    """The batch with two requests more, which have no row, and `rows` rows of no request."""
    if rows == 0:
        return batch

    def longer(tensor: torch.Tensor, count: int, value: float) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_full((count, *tensor.shape[1:]), value)])

    nan, starts = float("nan"), batch.query_start_loc
    return replace(
        batch,
        query=longer(batch.query, rows, nan),
        query_rope=longer(batch.query_rope, rows, nan),
        query_start_loc=longer(starts, 2, int(starts[-1])),
        prefix_lens=longer(batch.prefix_lens, 2, 0),
        block_table=longer(batch.block_table, 2, 0),
        row_masks=longer(batch.row_masks, rows, -1),
        num_rows=longer(batch.num_rows, 2, 0),
    )


def latent_draft_problem(
    shape: LatentShape,
    topk: int,
    steps: int,
    level: int,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> LatentDraftBatch:
    """A random frontier of a draft; ``shape.rows`` is unused.

    Block 0, all slots behind a request's prefix, and the scratch of levels that are still to come
    hold NaN: reading them shows.
    """
    generator = torch.Generator().manual_seed(seed)
    num_reqs = len(shape.prefixes)
    ancestors = torch.randint(0, topk, (num_reqs, topk, steps), generator=generator)
    ancestors[:, :, level] = torch.arange(topk)
    ancestors += torch.arange(steps) * topk
    width = shape.rank + shape.rope
    scratch = torch.randn(num_reqs + 1, steps * topk, 1, width, generator=generator)
    scratch[:, (level + 1) * topk :] = float("nan")
    latents, table = _pages(shape, list(shape.prefixes), generator)
    return LatentDraftBatch(
        **_queries(shape, num_reqs * topk, generator, device),
        latents=latents.to(device),
        scratch=scratch.to(device, shape.dtype),
        ancestors=ancestors.to(device, torch.int32),
        level=level,
        prefix_lens=torch.tensor(shape.prefixes, dtype=torch.int32, device=device),
        block_table=table.to(device),
        num_reqs=num_reqs,
        topk=topk,
        max_seq_len=table.shape[1] * shape.block_size,
        scale=width**-0.5,
        k_scale=torch.tensor(0.7, device=device) if shape.fp8 else None,
    )


def _queries(
    shape: LatentShape, rows: int, generator: torch.Generator, device: torch.device | str
) -> dict[str, torch.Tensor]:
    """Both parts of the queries, head by head, as a batched product leaves them."""

    def query(width: int) -> torch.Tensor:
        values = torch.randn(shape.heads, rows, width, generator=generator)
        return values.to(device, shape.dtype).transpose(0, 1)

    return {"query": query(shape.rank), "query_rope": query(shape.rope + 8)[..., 8:]}


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
