"""Rows of hot tokens, copied from a head as loaded or in FP8, whole or sharded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_graft.spec_decode.heads import hot_rows
from vllm_graft.spec_decode.heads.fp8_head import Fp8Head
from vllm_graft.spec_decode.heads.hot_rows import Fp8Rows, PlainRows, take_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, HIDDEN = 97, 64
IDS = [0, 3, 47, 48, 49, 95, 96]


def weight() -> torch.Tensor:
    made = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))
    return made.to(torch.bfloat16).to(DEVICE)


def ids() -> torch.Tensor:
    return torch.tensor(IDS, device=DEVICE)


def layer(rows: torch.Tensor) -> Any:
    return SimpleNamespace(weight=rows, tp_size=1)


def shards(rows: torch.Tensor) -> list[Any]:
    """The layers of two ranks; shards are padded to one size, as in vLLM."""
    layers = []
    for start, end in ((0, 48), (48, VOCAB)):
        bounds = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=end)
        shard = rows.new_zeros(50, HIDDEN)
        shard[: end - start] = rows[start:end]
        layers.append(SimpleNamespace(tp_size=2, weight=shard, shard_indices=bounds))
    return layers


def test_rows_are_those_of_the_head() -> None:
    whole = weight()
    rows = PlainRows(layer(whole), len(IDS))
    rows.take(ids())
    assert torch.equal(rows.weight, whole[IDS])
    assert rows.num_bytes == len(IDS) * HIDDEN * 2


def test_rows_in_fp8_are_those_of_the_head() -> None:
    whole = weight()
    fp8 = Fp8Head(whole)
    rows = Fp8Rows(fp8, layer(whole), len(IDS))
    rows.take(ids())
    assert torch.equal(rows.rows.weight.view(torch.uint8), fp8.weight.view(torch.uint8)[IDS])
    assert torch.equal(rows.rows.scale, fp8.scale[IDS])
    assert rows.num_bytes == len(IDS) * (HIDDEN + 4)
    states = weight()[:5]
    logits = rows.multiply(states)
    assert torch.equal(logits, fp8.apply(fp8, states)[:, IDS])
    # Negative control: rows of other tokens have other logits.
    rows.take(ids() - ids().sign())
    assert not torch.equal(rows.multiply(states), logits)


@pytest.mark.parametrize("chunk", [4096, 3])
def test_rows_of_a_sharded_head(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    import vllm.distributed

    monkeypatch.setattr(hot_rows, "_CHUNK", chunk)

    monkeypatch.setattr(vllm.distributed, "tensor_model_parallel_all_reduce", lambda rows: rows)
    whole = weight()
    first, second = (take_rows(shard, ids()) for shard in shards(whole))
    assert torch.equal(first + second, whole[IDS])
    found = []
    for shard in shards(whole):
        rows = PlainRows(shard, len(IDS))
        rows.take(ids())
        found.append(rows.weight)
    assert torch.equal(found[0] + found[1], whole[IDS])


@pytest.mark.parametrize("chunk", [4096, 3])
def test_fp8_rows_of_a_sharded_head(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Each rank gets the bytes of all: those that it holds, and those of the others."""
    monkeypatch.setattr(hot_rows, "_CHUNK", chunk)
    whole = weight()
    sent: list[torch.Tensor] = []

    def first_pass(rows: torch.Tensor) -> torch.Tensor:
        sent.append(rows.clone())
        return rows[None]

    def take(shard: Any) -> Fp8Rows:
        rows = Fp8Rows(Fp8Head(shard.weight, 2), shard, len(IDS))
        rows.take(ids())
        return rows

    monkeypatch.setattr(hot_rows, "gather_rows", first_pass)
    first, second = shards(whole)
    take(first)
    of_first, sent = sent, []
    monkeypatch.setattr(hot_rows, "gather_rows", lambda rows: torch.stack((of_first.pop(0), rows)))
    found = take(second).rows
    expected = Fp8Head(whole)
    assert torch.equal(found.weight.view(torch.uint8), expected.weight.view(torch.uint8)[IDS])
    assert torch.equal(found.scale, expected.scale[IDS])
    assert found.tp_size == 1, "each rank has all rows, so that nothing is gathered"
