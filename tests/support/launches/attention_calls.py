"""Calls of attention over trees: paged keys, a tree's own rows, latents, narrowed tables."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from vllm_graft.spec_decode.kernels.attention.attention_plan import AttentionWorkspace, Plan, Tile
from vllm_graft.spec_decode.kernels.attention.own_rows import attend_own_rows
from vllm_graft.spec_decode.kernels.attention.tree_attention import tree_attention, write_scratch
from vllm_graft.spec_decode.kernels.kernel_launch import next_power_of_2
from vllm_graft.spec_decode.startup.stand_ins import META, empty
from vllm_graft.spec_decode.targets.dense.window import windowed_table
from vllm_graft.spec_decode.targets.latent.latent_attention import copy_tree_rows, latent_attention
from vllm_graft.spec_decode.targets.latent.own_latents import attend_own_latents
from vllm_graft.spec_decode.trees.batch import DraftBatch, LatentBatch, LatentDraftBatch, TreeBatch

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
GROUP, STEPS = 4, 6
f32 = partial(empty, dtype=FP32)


def batch_of(
    dtype: torch.dtype,
    head: int,
    rows: int,
    *,
    num_reqs: int = 1,
    kv_heads: int = 8,
    fp8: bool = False,
    small: bool = False,
    draft: bool = False,
    window: int = 0,
    chunked: bool = False,
    sinks: bool = False,
) -> TreeBatch | DraftBatch:
    """A batch with scales and a cap of logits, and sinks beside a window.

    With `small` its query is in e4m3, too.
    """
    tokens, heads = num_reqs * rows, GROUP * kv_heads
    query = empty(tokens, heads + 2 * kv_heads, head, dtype=E4M3 if small else dtype)[:, :heads]
    keys = window + rows if window else 32_768
    shared: dict[str, Any] = {
        "query": query,
        "kv_cache": empty(4, kv_heads, 16, 2 * head, dtype=E4M3 if fp8 else dtype),
        "prefix_lens": empty(num_reqs), "block_table": empty(num_reqs, 2048),
        "scale": 0.1, "soft_cap": 30.0, "max_seq_len": keys, "window": window,
        "sinks": empty(heads, dtype=dtype) if sinks or window else None,
        "q_scale": f32(1) if small else None, "k_scale": f32(1), "v_scale": f32(1),
    }  # fmt: skip
    if draft:
        scratch = empty(num_reqs, STEPS * rows, kv_heads, 2 * head, dtype=dtype)
        ancestors = empty(num_reqs, rows, STEPS)
        return DraftBatch(
            scratch_kv=scratch, ancestors=ancestors, level=2, num_reqs=num_reqs, topk=rows, **shared
        )
    return TreeBatch(
        query_start_loc=empty(num_reqs + 1), seq_lens=empty(num_reqs), num_rows=empty(num_reqs),
        row_masks=empty(tokens, dtype=torch.int64), row_depths=empty(tokens), max_rows=rows,
        chunked=chunked, **shared,
    )  # fmt: skip


def space_of(rows: int, heads: int, size: int, num_reqs: int = 1) -> AttentionWorkspace:
    """Memory for 64 splits of an H200."""
    made = AttentionWorkspace.allocate(num_reqs, rows, heads, size, 64, META)
    pairs = 64 * num_reqs * rows * heads
    sizes = {"acc": f32(pairs * size), "peak": f32(pairs), "total": f32(pairs)}
    return replace(made, **sizes, max_splits=64, multiprocessors=132, capability=(9, 0))


def attend(
    dtype: torch.dtype,
    head: int,
    rows: int,
    *,
    plan: Plan | None = None,
    native: bool = False,
    **kinds: Any,
) -> None:
    """Attend by a plan; without one by what the rule for sm_90 on takes."""
    batch = batch_of(dtype, head, rows, small=native, **kinds)
    out = empty(*batch.query.shape, dtype=dtype)
    space = space_of(rows, out.shape[1], head, batch.num_reqs)
    given: Any = {"workspace": space, "plan": plan}
    tree_attention(batch, out, **given)


def attend_plainly(
    dtype: torch.dtype, head: int, rows: int, *, crowded: bool = True, **kinds: Any
) -> None:
    """Attend by tiles of other architectures."""
    sizes = rows * GROUP, next_power_of_2(head), dtype
    tile = Tile.choose(*sizes, crowded=crowded, split=True)
    attend(dtype, head, rows, plan=Plan(tile, 31), **kinds)


def own_rows(
    dtype: torch.dtype, head: int, rows: int, *, fp8: bool = False, sinks: bool = False
) -> None:
    """FlashAttention's output beside a cache in e4m3 is bf16."""
    batch = batch_of(dtype, head, rows, fp8=fp8, small=fp8, sinks=sinks)
    assert isinstance(batch, TreeBatch)
    tokens, heads, _ = batch.query.shape
    prefix = empty(*batch.query.shape, dtype=BF16 if fp8 else dtype)
    attend_own_rows(batch, prefix, f32(heads, tokens), torch.empty_like(prefix, dtype=dtype))


def scratch(dtype: torch.dtype, key: int, value: int) -> None:
    keys, values = (empty(16, 2, size, dtype=dtype) for size in (key, value))
    write_scratch(keys, values, empty(2, 48, 2, key + value, dtype=dtype), 2, 2, 8)


def narrow(*, extend: bool) -> None:
    starts = empty(3) if extend else None
    windowed_table(empty(2, 512), empty(2), starts, window=512, max_rows=8, block_size=16)


def latent_batch(
    dtype: torch.dtype,
    heads: int,
    rows: int,
    *,
    num_reqs: int = 1,
    fp8: bool = False,
    mixed: bool = False,
    draft: bool = False,
) -> LatentBatch | LatentDraftBatch:
    tokens = num_reqs * rows
    shared: dict[str, Any] = {
        "query": empty(tokens, heads, 512, dtype=dtype),
        "query_rope": empty(tokens, heads, 64, dtype=dtype),
        "latents": empty(4, 64, 576, dtype=E4M3 if fp8 else dtype),
        "prefix_lens": empty(num_reqs), "block_table": empty(num_reqs, 512),
        "max_seq_len": 32_768, "scale": 0.1, "k_scale": f32(1) if fp8 else None,
    }  # fmt: skip
    if draft:
        own = empty(num_reqs, STEPS * rows, 1, 576, dtype=dtype), empty(num_reqs, rows, STEPS)
        scratch, ancestors = own
        return LatentDraftBatch(
            scratch=scratch, ancestors=ancestors, level=2, num_reqs=num_reqs, topk=rows, **shared
        )
    masks = empty(tokens, dtype=torch.int64)
    return LatentBatch(
        query_start_loc=empty(num_reqs + 1), row_masks=masks, num_rows=empty(num_reqs),
        max_rows=rows, mixed=mixed, **shared,
    )  # fmt: skip


def latents(dtype: torch.dtype, heads: int, rows: int, **kinds: Any) -> None:
    batch = latent_batch(dtype, heads, rows, **kinds)
    out, space = torch.empty_like(batch.query), space_of(rows, heads, 512)
    if isinstance(batch, LatentDraftBatch):
        latent_attention(batch, out, workspace=space, num_splits=63)
    else:
        latent_attention(batch, out, workspace=space, num_splits=63)
        copied = empty(rows, 2048, dtype=dtype)
        copy_tree_rows(copied, copied, batch)


def own_latents(dtype: torch.dtype, heads: int, rows: int, num_reqs: int = 1) -> None:
    batch = latent_batch(dtype, heads, rows, num_reqs=num_reqs)
    assert isinstance(batch, LatentBatch)
    prefix, sums = torch.empty_like(batch.query), f32(heads, num_reqs * rows)
    attend_own_latents(batch, prefix, sums, prefix)


def calls() -> Iterator[Callable[[], object]]:
    for dtype, head, rows, kinds in PLAIN:
        yield partial(attend_plainly, dtype, head, rows, **kinds)
    for dtype, head, rows, kinds in OWN_ROWS:
        yield partial(own_rows, dtype, head, rows, **kinds)
    for dtype, heads, rows, kinds in LATENTS:
        yield partial(latents, dtype, heads, rows, **kinds)
    for sizes in ((BF16, 16, 32), (BF16, 16, 32, 16), (BF16, 128, 64, 4), (FP16, 1, 4)):
        yield partial(own_latents, *sizes)
    for dtype, key, value in ((BF16, 128, 128), (FP32, 80, 80), (BF16, 512, 64)):
        yield partial(scratch, dtype, key, value)
    yield from (partial(narrow, extend=extend) for extend in (True, False))


def planned(cases: list[tuple[int, int, int, dict[str, Any]]]) -> Iterator[Callable[[], object]]:
    """What the rule for sm_90 on takes, whose launches overlap; less than sm_90 refuses that."""
    for head, rows, num_reqs, kinds in cases:
        yield partial(attend, BF16, head, rows, num_reqs=num_reqs, **kinds)


Case = tuple[torch.dtype, int, int, dict[str, Any]]

PLAIN: list[Case] = [
    (BF16, 128, 32, {}),
    (BF16, 128, 64, {"fp8": True}),
    (BF16, 256, 64, {}),
    (BF16, 128, 32, {"crowded": False}),
    (BF16, 256, 64, {"fp8": True, "crowded": False}),
    (BF16, 256, 64, {"window": 1024}),
    (BF16, 512, 64, {"window": 1024}),
    (BF16, 64, 32, {"fp8": True, "window": 128}),
    (BF16, 128, 64, {"window": 8192, "chunked": True}),
    (BF16, 128, 8, {"draft": True, "window": 512}),
    (BF16, 128, 8, {"draft": True}),
    (BF16, 128, 8, {"draft": True, "crowded": False}),
    (FP16, 80, 8, {"draft": True, "fp8": True}),
    (FP32, 64, 16, {}),
]
"""Sizes of heads and rows of a request's tree, or children of a draft's node."""

OWN_ROWS: list[Case] = [
    (BF16, 128, 32, {}),
    (BF16, 256, 64, {}),
    (FP16, 80, 20, {"fp8": True}),
    (BF16, 64, 64, {"fp8": True}),
    (BF16, 64, 32, {"sinks": True}),
]

LATENTS: list[Case] = [
    (BF16, 16, 32, {}),
    (BF16, 128, 64, {"fp8": True}),
    (FP16, 16, 8, {"mixed": True}),
    (BF16, 16, 8, {"draft": True}),
    (BF16, 128, 8, {"fp8": True, "draft": True}),
    (FP16, 64, 1, {"draft": True}),
]
"""Heads, and rows of a request."""

Planned = list[tuple[int, int, int, dict[str, Any]]]

PLANS: Planned = [
    (128, 8, 16, {}),
    (128, 32, 1, {"fp8": True}),
    (128, 32, 1, {"fp8": True, "native": True}),
    (256, 32, 16, {"window": 1024}),
    (512, 32, 1, {}),
]
"""Sizes of heads, rows of a request, and requests."""

RARE_PLANS: Planned = [
    (64, 32, 1, {"fp8": True, "window": 128}),
    (128, 8, 1, {"fp8": True}),
    (128, 4, 16, {}),
    (128, 4, 64, {"fp8": True}),
    (128, 32, 64, {}),
    (128, 8, 4, {"draft": True}),
    (128, 4, 16, {"draft": True}),
    (256, 32, 1, {"fp8": True}),
    (256, 8, 1, {}),
    (512, 32, 16, {"fp8": True}),
    (512, 8, 4, {}),
    (64, 32, 1, {"fp8": True, "window": 128, "native": True}),
    (128, 8, 1, {"fp8": True, "draft": True, "native": True}),
    (128, 64, 1, {"fp8": True, "native": True}),
    (128, 16, 4, {"fp8": True, "native": True}),
    (256, 64, 1, {"fp8": True, "native": True}),
    (256, 16, 1, {"fp8": True, "native": True}),
]  # fmt: skip
"""They take minutes to compile."""
