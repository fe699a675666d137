"""Prompts beside trees in a replayed graph: FlashAttention 3 skips the trees' rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vllm_graft.spec_decode.kernels.attention.tree_attention import (
    tree_attention,
)
from vllm_graft.spec_decode.kernels.attention.workspace import AttentionWorkspace
from vllm_graft.spec_decode.targets.dense.plain_attention import tree_attention_reference
from vllm_graft.spec_decode.targets.dense.samples import AttentionShape, tree_problem
from vllm_graft.spec_decode.trees.batch import TreeBatch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("flash_attention_3")]

RELATIVE = 2e-2
SPLITS = 32


def stock(batch: TreeBatch, lens: torch.Tensor, out: torch.Tensor, *, splits: int) -> None:
    """Call FlashAttention as vLLM's backend does for prompts and decodes, without a schedule."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    key, value = batch.kv_cache.transpose(1, 2).split(batch.query.shape[2], dim=-1)
    flash_attn_varlen_func(
        q=batch.query,
        k=key,
        v=value,
        out=out,
        cu_seqlens_q=batch.query_start_loc,
        max_seqlen_q=len(batch.query),
        seqused_k=lens,
        max_seqlen_k=batch.max_seq_len,
        block_table=batch.block_table,
        softmax_scale=batch.scale,
        causal=True,
        num_splits=splits,
        fa_version=3,
    )


@pytest.mark.parametrize("rows", [(8, 0, 8, 0, 8, 0), (64, 0, 4, 20, 1, 0), (4,) * 64 + (0,) * 8])
def test_rows_are_those_of_separate_passes(rows: tuple[int, ...]) -> None:
    lens = tuple(100 + 37 * i for i in range(len(rows)))
    shape = AttentionShape(
        rows=rows, lens=lens, kv_heads=8, group=4, head_size=128, dtype=torch.bfloat16
    )
    batch = replace(tree_problem(shape, "cuda"), max_rows=64, max_seq_len=8192, mixed=True)
    workspace = AttentionWorkspace.allocate(len(rows), 64, 32, 128, 8, "cuda")
    wanted = torch.full(batch.query.shape, float("nan"), dtype=torch.bfloat16, device="cuda")
    stock(batch, batch.seq_lens, wanted, splits=0)
    trees = wanted.float()
    tree_attention_reference(batch, trees)
    # An engine captures over a batch without keys, too.
    plain, num_rows = torch.zeros_like(batch.seq_lens), batch.num_rows.clone()
    batch.num_rows.zero_()
    out = torch.full_like(wanted, float("nan"))

    def run() -> None:
        stock(batch, plain, out, splits=SPLITS)
        tree_attention(batch, out, workspace=workspace)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    batch.num_rows.copy_(num_rows)
    whole = num_rows == batch.query_start_loc.diff()
    plain.copy_(torch.where(whole, 0, batch.seq_lens))
    out.fill_(float("nan"))
    graph.replay()
    assert not out.isnan().any()
    error = (out.float() - trees).norm(dim=-1)
    assert (error <= RELATIVE * trees.norm(dim=-1)).all()
    # Negative control: without the tree kernel the trees' rows differ.
    stock(batch, plain, out, splits=SPLITS)
    assert ((out.float() - trees).norm(dim=-1) > RELATIVE * trees.norm(dim=-1)).any()
