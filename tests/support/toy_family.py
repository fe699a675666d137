"""A toy target family: sliding windows that are wider than any text, in one file with one entry.

It brings what a family may bring: a layer, a kernel, a refusal and a row of the ledger.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_graft import hookimpl
from vllm_graft.base.options import flag
from vllm_graft.base.refusal import Refusals
from vllm_graft.hooks.entries import TargetFamily
from vllm_graft.seams.ledger.entry import Seam
from vllm_graft.spec_decode.targets.dense import plain_attention
from vllm_graft.spec_decode.targets.dense.layer import DenseFamily
from vllm_graft.spec_decode.trees.batch import TreeBatch
from vllm_graft.spec_decode.verification.context import VerifyMode

LONGEST = 256
"""Tokens of the longest text of the engines that are tested."""

WIDEST = 4
"""Children of a node that the family takes."""


@triton.jit
def _toy_kernel(
    query,
    cache,
    starts,
    lens,
    num_rows,
    table,
    masks,
    out,
    scale,
    token_stride,
    block_stride,
    head_stride,
    slot_stride,
    table_stride,
    out_stride,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
):
    req, row, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tl.load(num_rows + req)
    if row >= rows:
        return
    token = tl.load(starts + req + 1) - rows + row
    length = tl.load(lens + req)
    key, part = tl.arange(0, KEYS), tl.arange(0, SIZE)
    # A row sees the keys before the tree, and rows of the tree that its mask has.
    own = key - (length - rows)
    bits = tl.load(masks + token) >> tl.maximum(own, 0).to(tl.int64)
    seen = (key < length) & ((own < 0) | ((bits & 1) != 0))
    block = tl.load(table + req * table_stride + key // BLOCK, mask=seen, other=0).to(tl.int64)
    place = block * block_stride + (head // GROUP) * head_stride + (key % BLOCK) * slot_stride
    at = cache + place[:, None] + part[None, :]
    q = tl.load(query + token * token_stride + head * SIZE + part).to(tl.float32)
    k = tl.load(at, mask=seen[:, None], other=0).to(tl.float32)
    v = tl.load(at + SIZE, mask=seen[:, None], other=0).to(tl.float32)
    logits = tl.where(seen, tl.sum(k * q[None, :], 1) * scale, -float("inf"))
    weights = tl.exp(logits - tl.max(logits, 0))
    found = tl.sum(weights[:, None] * v, 0) / tl.sum(weights, 0)
    tl.store(out + token * out_stride + head * SIZE + part, found)


def toy_attention(batch: TreeBatch, out: torch.Tensor) -> None:
    """Compute the rows of trees whose requests have at most `LONGEST` tokens."""
    query, cache, table = batch.query, batch.kv_cache, batch.block_table
    heads, size = query.shape[1:]
    _toy_kernel[(batch.num_reqs, batch.max_rows, heads)](
        query,
        cache,
        batch.query_start_loc,
        batch.seq_lens,
        batch.num_rows,
        table,
        batch.row_masks,
        out,
        batch.scale,
        query.stride(0),
        *cache.stride()[:3],
        table.stride(0),
        out.stride(0),
        GROUP=heads // cache.shape[1],
        SIZE=size,
        BLOCK=cache.shape[2],
        KEYS=LONGEST,
    )


class ToyAttention:
    """Stands before a layer's implementation: rows of trees go to the kernel."""

    graft: Any
    launches = 0

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        **scales: Any,
    ) -> torch.Tensor:
        mode = self.graft.mode
        stock: Any = super()
        if attn_metadata is None or mode is not VerifyMode.ALL:
            stock.forward(layer, query, key, value, kv_cache, attn_metadata, output, **scales)
        if attn_metadata is not None and mode is not VerifyMode.NONE:
            self._verify(layer, query, kv_cache, attn_metadata, output)
        return output

    def _verify(self, layer: Any, query: Any, cache: Any, metadata: Any, out: Any) -> None:
        ToyAttention.launches += 1
        rows, num_reqs = self.graft.rows, len(metadata.query_start_loc) - 1
        batch = TreeBatch(
            query=query,
            kv_cache=cache,
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens[:num_reqs],
            prefix_lens=rows.prefix_lens[:num_reqs],
            block_table=metadata.block_table,
            row_masks=rows.row_masks,
            num_rows=rows.num_rows[:num_reqs],
            max_rows=self.graft.shape.num_nodes + 1,
            max_seq_len=LONGEST,
            scale=layer.head_size**-0.5,
        )
        toy_attention(batch, out)


class ToyFamily(DenseFamily):
    """Layers with a window that no text fills, whose K/V is where that of plain attention is."""

    attached: list[str] = []  # noqa: RUF012

    def claims(self, layer: Any) -> bool:
        window = getattr(getattr(layer, "impl", None), "sliding_window", None)
        return super().claims(layer) and isinstance(window, int) and window >= LONGEST

    def attach(self, name: str, layer: Any, context: Any, *, is_draft: bool) -> None:
        assert not is_draft
        plain_attention.replace(layer)
        impl: Any = object.__new__(type("ToyImpl", (ToyAttention, type(layer.impl)), {}))
        impl.__dict__.update(vars(layer.impl), graft=context)
        layer.impl = impl
        self.attached.append(name)


REFUSALS = Refusals()


@REFUSALS.row(
    "toys with many children",
    f"A toy has {WIDEST} children at most.",
    f"set `{flag('tree', 'topk')}` to {WIDEST}",
)
def _too_wide(tree: Any, vllm_config: Any) -> Iterator[str]:
    window = getattr(vllm_config.model_config.hf_text_config, "sliding_window", None)
    if window and window >= LONGEST and tree.topk > WIDEST:
        yield f"{flag('tree', 'topk')} is {tree.topk}"


SEAMS = (
    Seam(
        "toy",
        "v1.attention.backend.AttentionImpl.forward",
        "call",
        "self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=, "
        "output_block_scale=",
        "rows of trees go to the toy's kernel",
        "toys are no longer tested",
    ),
)


@hookimpl
def graft_target_families() -> list[TargetFamily]:
    here = "tests.support.toy_family"
    return [
        TargetFamily(
            "toy",
            f"{here}:ToyFamily",
            "windows that no text fills",
            serves=("sliding-window attention",),
            refusals=f"{here}:REFUSALS",
            seams=f"{here}:SEAMS",
        )
    ]
