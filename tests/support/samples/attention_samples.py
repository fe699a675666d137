"""Random levels of drafts, and what outputs of attention kernels are compared by."""

import torch

from vllm_graft.spec_decode.targets.dense.samples import AttentionShape, _cache, _query
from vllm_graft.spec_decode.trees.batch import DraftBatch

UNTOUCHED = 77.0
"""Fills an output before a kernel runs: rows that are not computed keep it."""

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Largest error of an output in the interpreter: half a unit in the last place of the output, whose
values reach 6, and of the softmax weights."""


def draft_problem(
    shape: AttentionShape,
    topk: int,
    steps: int,
    level: int,
    device: torch.device | str,
    seed: int = 0,
) -> DraftBatch:
    """A random frontier of a draft; ``shape.rows`` is unused."""
    generator = torch.Generator().manual_seed(seed)
    num_reqs = len(shape.lens)
    ancestors = torch.randint(0, topk, (num_reqs, topk, steps), generator=generator)
    ancestors[:, :, level] = torch.arange(topk)
    ancestors += torch.arange(steps) * topk
    scratch = torch.randn(
        num_reqs + 1, steps * topk, shape.kv_heads, 2 * shape.head_size, generator=generator
    )
    firsts = [length + level for length in shape.lens]
    return DraftBatch(
        **_cache(shape, device, generator, firsts),
        query=_query(shape, num_reqs * topk, device, generator),
        scratch_kv=scratch.to(device, shape.dtype),
        ancestors=ancestors.to(device, torch.int32),
        level=level,
        prefix_lens=torch.tensor(shape.lens, dtype=torch.int32, device=device),
        scale=shape.head_size**-0.5,
        num_reqs=num_reqs,
        topk=topk,
    )


def untouched(query: torch.Tensor) -> torch.Tensor:
    """An output for a query: contiguous, of its shape and dtype, full of `UNTOUCHED`."""
    return torch.full_like(query, UNTOUCHED, memory_format=torch.contiguous_format)
