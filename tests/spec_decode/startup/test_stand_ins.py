"""Layers without an engine ask for the kernels that an engine's layers launch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_graft.spec_decode.kernels.attention import e4m3
from vllm_graft.spec_decode.kernels.attention.workspace import AttentionWorkspace
from vllm_graft.spec_decode.kernels.listed_launch import Launch, listing
from vllm_graft.spec_decode.startup.stand_ins import Attention, LayerShape, empty
from vllm_graft.spec_decode.verification.context import VerifyMode

LAYER = LayerShape(
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    dtype=torch.bfloat16,
    fp8=True,
    block_size=16,
    max_len=512,
)


def context(capability: tuple[int, int]) -> Any:
    space = AttentionWorkspace.allocate(2, 8, 4, 64, 8, "meta")
    return SimpleNamespace(
        mode=VerifyMode.ALL,
        shape=SimpleNamespace(num_nodes=7, topk=4),
        rows=SimpleNamespace(
            row_masks=empty(16, dtype=torch.int64),
            row_depths=empty(16),
            num_rows=empty(2),
            prefix_lens=empty(2),
        ),
        draft_window=0,
        workspace=replace(space, multiprocessors=132, capability=capability),
    )


def split_launches(layer: LayerShape, capability: tuple[int, int]) -> list[dict[str, Any]]:
    """Arguments of the kernel of splits, for a tree and for a level of a draft."""
    found: list[Launch] = []
    shared = context(capability)
    metadata = SimpleNamespace(
        level=1,
        topk=4,
        num_reqs=2,
        prefix_lens=empty(2),
        block_table=layer.block_table(2),
        ancestors=empty(2, 4, 3),
        scratch=empty(2, 12, 2, 128).to(layer.dtype),
        max_seq_len=512,
    )
    with listing(found.append):
        Attention(layer, shared, is_draft=False).verify(2, 8, 512)
        Attention(layer, shared, is_draft=True).draft(metadata)
    found = [each for each in found if each.name == "split_kernel"]
    assert len(found) == 2
    return [dict(each.arguments) for each in found]


@pytest.mark.parametrize("form", [e4m3.HALVES, e4m3.PRODUCTS])
def test_queries_are_e4m3_where_kernels_take_them(
    form: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(e4m3, "NATIVE", e4m3.Native(form))
    for given in split_launches(LAYER, (9, 0)):
        assert given["query"].dtype == given["kv_cache"].dtype == "float8_e4m3fn"
        assert given["q_scale"].dtype == "float32"
        assert given["FP8"] == form
        assert given["out"].dtype == "bfloat16"
    # Controls: a device that does not know them, a cache in 16 bits, and as it is without.
    for given in split_launches(LAYER, (8, 0)):
        assert (given["query"].dtype, given["kv_cache"].dtype) == ("bfloat16", "uint8")
        assert given["q_scale"] is None
    for given in split_launches(replace(LAYER, fp8=False), (9, 0)):
        assert given["query"].dtype == given["kv_cache"].dtype == "bfloat16"
    monkeypatch.setattr(e4m3, "NATIVE", None)
    for given in split_launches(LAYER, (9, 0)):
        assert given["query"].dtype == "bfloat16"
