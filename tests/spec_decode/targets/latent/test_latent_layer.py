"""Layers with MLA: which rows tree attention computes, and that they are those of K and V."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.attention import MLAAttention

from tests.support.references.prefix_reference import prefix_latents_reference
from tests.support.samples.latent_samples import LatentShape, latent_draft_problem, latent_problem
from vllm_graft.base.errors import ConfigError, SeamError
from vllm_graft.spec_decode.targets.dense.layer import DraftTreeMetadata
from vllm_graft.spec_decode.targets.dense.two_pass import KernelChoice, Passes, TwoPass
from vllm_graft.spec_decode.targets.families import families, family_of
from vllm_graft.spec_decode.targets.latent.latent_layer import (
    TORCH,
    TRITON,
    LatentFamily,
    TreeLatents,
)
from vllm_graft.spec_decode.targets.latent.own_latents import attend_own_latents
from vllm_graft.spec_decode.verification.context import Made, T, VerifyMode

HEADS, RANK, ROPE, NOPE, VALUE = 3, 32, 16, 8, 4
STOCK = 5.0
"""What the stand-in for the platform writes."""


class Context(SimpleNamespace):
    """What a layer asks of the tree's context."""

    draft_window = 0

    def once(self, metadata: T, make: Any) -> Made:
        made: Made = make(metadata)
        return made


def mla(backend: str = "CPU_MLA", **changed: Any) -> Any:
    """Make a layer of vLLM's class, without its constructor, which needs an engine."""
    layer: Any = MLAAttention.__new__(MLAAttention)
    torch.nn.Module.__init__(layer)
    generator = torch.Generator().manual_seed(1)
    attributes = {
        "num_heads": HEADS, "kv_lora_rank": RANK, "qk_rope_head_dim": ROPE,
        "qk_nope_head_dim": NOPE, "v_head_dim": VALUE, "head_size": RANK + ROPE, "scale": 0.3,
        "kv_cache_dtype": "auto",
        "sliding_window": None, "impl": SimpleNamespace(is_sparse=False, sliding_window=None),
        "is_aiter_triton_fp4_bmm_enabled": False, "is_aiter_triton_fp8_bmm_enabled": False,
        "is_amx_bmm_enabled": False, "attn_backend": SimpleNamespace(get_name=lambda: backend),
        "W_UK_T": torch.randn(HEADS, NOPE, RANK, generator=generator),
        "W_UV": torch.randn(HEADS, RANK, VALUE, generator=generator),
        "_vllm_config": SimpleNamespace(
            compilation_config=SimpleNamespace(pass_config=SimpleNamespace(fuse_attn_quant=False))
        ),
    }  # fmt: skip
    for name, value in {**attributes, **changed}.items():
        setattr(layer, name, value)
    return layer


def expanded(layer: Any, q: torch.Tensor, cache: torch.Tensor, batch: Any) -> torch.Tensor:
    """Attention of tree rows with K and V of each head, made of the latents; others are NaN."""
    out = torch.full((len(q), HEADS * VALUE), float("nan"))
    starts = batch.query_start_loc.tolist()
    for r, rows in enumerate(batch.num_rows.tolist()):
        end, prefix = starts[r + 1], int(batch.prefix_lens[r])
        slots = torch.arange(prefix + rows)
        keys = cache[batch.block_table[r, slots // 16].long(), slots % 16]
        nope = torch.einsum("nl,hpl->nhp", keys[:, :RANK], layer.W_UK_T)
        key = torch.cat([nope, keys[:, None, RANK:].expand(-1, HEADS, -1)], dim=-1)
        value = torch.einsum("nl,hlv->nhv", keys[:, :RANK], layer.W_UV)
        for i in range(rows):
            row = end - rows + i
            mask = int(batch.row_masks[row])
            seen = [*range(prefix), *(prefix + j for j in range(rows) if mask >> j & 1)]
            logits = torch.einsum("hd,nhd->hn", q[row], key[seen]) * layer.scale
            out[row] = torch.einsum("hn,nhv->hv", logits.softmax(-1), value[seen]).flatten()
    return out


def step(mode: VerifyMode) -> tuple[Any, Any, Any, torch.Tensor]:
    """Make a batch of two trees and a prompt of five tokens, for a layer with `mode`."""
    batch = latent_problem(LatentShape(rows=(4, 3, 0), prefixes=(20, 33, 40), heads=HEADS))
    lengths = [4, 6, 5]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    masks = torch.zeros(15, dtype=torch.int64)
    masks[:10] = batch.row_masks[:10]
    drafts = np.array([3, 2, 0])
    context = Context(
        mode=mode,
        shape=SimpleNamespace(num_nodes=7),
        workspace=None,
        step=SimpleNamespace(
            batch=SimpleNamespace(
                num_draft_tokens_per_req=drafts, num_scheduled_tokens=np.array(lengths)
            )
        ),
        rows=SimpleNamespace(
            prefix_lens=batch.prefix_lens, num_rows=batch.num_rows, row_masks=masks
        ),
    )
    # The platform takes the first request as a decode, and the others as prompts.
    metadata = SimpleNamespace(
        num_reqs=3,
        num_actual_tokens=15,
        query_start_loc=starts,
        max_query_len=6,
        max_seq_len=64,
        decode=SimpleNamespace(block_table=batch.block_table[:1]),
        prefill=SimpleNamespace(block_table=batch.block_table[1:]),
    )
    query = torch.randn(16, HEADS, NOPE + ROPE, generator=torch.Generator().manual_seed(2))
    wanted = SimpleNamespace(
        query_start_loc=starts,
        num_rows=batch.num_rows,
        prefix_lens=batch.prefix_lens,
        block_table=batch.block_table,
        row_masks=masks,
    )
    return context, metadata, (wanted, batch.latents), query


def run(
    layer: Any,
    context: Any,
    metadata: Any,
    cache: Any,
    query: Any,
    ops: Any,
    *,
    is_draft: bool = False,
    two_pass: TwoPass | None = None,
) -> Any:
    calls: list[Any] = []

    def stock(q: Any, latent: Any, rope: Any, kv_cache: Any, given: Any, output: Any) -> Any:
        calls.append(given)
        return output.fill_(STOCK)

    out = torch.full((len(query), HEADS * VALUE), 7.0)
    graft = TreeLatents(layer, context, ops, stock, is_draft)
    graft.two_pass = two_pass
    assert graft(query, None, None, cache, metadata, out) is out  # type: ignore[arg-type]
    return out, calls


@pytest.mark.parametrize("ops", [TORCH, TRITON])
def test_rows_of_trees_are_put_over_the_platform_s(ops: Any) -> None:
    layer = mla()
    context, metadata, (wanted, cache), query = step(VerifyMode.MIXED)
    out, calls = run(layer, context, metadata, cache, query, ops)
    assert calls == [metadata]
    expected = expanded(layer, query, cache, wanted).nan_to_num(STOCK)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    # Three rows before the second tree, the prompt and the padding are the platform's.
    assert (out == STOCK).all(-1).tolist() == [False] * 4 + [True] * 3 + [False] * 3 + [True] * 6
    # Negative control: other ancestors give other rows.
    context.rows.row_masks.fill_(-1)
    assert not torch.allclose(run(layer, context, metadata, cache, query, ops)[0], expected)


@pytest.mark.parametrize("ops", [TORCH, TRITON])
def test_memory_that_a_mixed_batch_finds_is_not_passed_on(
    ops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is blanked there: rows of no tree are NaN, and the platform's stay as they are."""
    layer = mla()
    context, metadata, (wanted, cache), query = step(VerifyMode.MIXED)
    monkeypatch.setattr(torch, "empty_like", lambda each: torch.full_like(each, float("nan")))
    out, _ = run(layer, context, metadata, cache, query, ops)
    expected = expanded(layer, query, cache, wanted).nan_to_num(STOCK)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    # Negative control: a batch of trees alone takes what it finds there for rows of padding.
    monkeypatch.setattr(torch, "zeros_like", torch.empty_like)
    context.mode = VerifyMode.ALL
    assert run(layer, context, metadata, cache, query, ops)[0].isnan().any()


def test_the_second_pass_blanks_rows_of_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's batch has three rows behind the last request's, and a query of 16."""
    layer = mla()
    context, metadata, (wanted, cache), query = step(VerifyMode.ALL)
    metadata.num_actual_tokens = 18
    query = torch.cat([query[:15], query.new_full((4, *query.shape[1:]), float("nan"))])
    firsts: list[torch.Tensor] = []

    def first_pass(batch: Any, **options: Any) -> Any:
        assert options["plan"] is batch.prefix_lens
        out, lse = prefix_latents_reference(batch, multiprocessors=options["multiprocessors"])
        firsts.append(out.clone())
        return out, lse

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    context.workspace = SimpleNamespace(multiprocessors=8)
    passes = Passes(lambda batch, **_: batch.prefix_lens, first_pass, attend_own_latents)
    two_pass = TwoPass(KernelChoice("flash"), passes)
    out, calls = run(layer, context, metadata, cache, query, TRITON, two_pass=two_pass)
    assert calls == []
    expected = expanded(layer, query, cache, wanted)[:18].nan_to_num(0.0)
    torch.testing.assert_close(out[:18], expected, atol=1e-5, rtol=1e-5)
    blank = [False] * 4 + [True] * 3 + [False] * 3 + [True] * 8
    assert (out[:18] == 0).all(-1).tolist() == blank
    assert (out[18:] == 7.0).all()
    # Negative control: the first pass leaves NaN in rows of padding.
    [first] = firsts
    assert first[15:18].isnan().all()


@pytest.mark.parametrize("ops", [TORCH, TRITON])
def test_a_batch_of_trees_is_ours_alone(ops: Any) -> None:
    layer = mla()
    context, metadata, (wanted, cache), query = step(VerifyMode.ALL)
    out, calls = run(layer, context, metadata, cache, query, ops)
    assert calls == []
    expected = expanded(layer, query, cache, wanted)
    computed = ~expected[:, 0].isnan()
    torch.testing.assert_close(out[computed], expected[computed], atol=1e-5, rtol=1e-5)
    assert out.isfinite().all()


@pytest.mark.parametrize("ops", [TORCH, TRITON])
def test_other_batches_are_the_platform_s(ops: Any) -> None:
    context, metadata, (_, cache), query = step(VerifyMode.NONE)
    out, calls = run(mla(), context, metadata, cache, query, ops)
    assert (calls, (out == STOCK).all()) == ([metadata], True)
    context.mode = VerifyMode.ALL
    out, calls = run(mla(), context, None, cache, query, ops)
    assert (calls, (out == STOCK).all()) == ([None], True)


@pytest.mark.parametrize(
    ("backend", "changed", "words"),
    [
        ("CUTLASS_MLA", {}, "uses CUTLASS_MLA: pass --attention-backend TRITON_MLA"),
        ("AMX_MLA", {}, "uses AMX_MLA: pass --attention-backend CPU_MLA"),
        ("FLASHMLA", {"kv_cache_dtype": "fp8_ds_mla"}, "cannot read --kv-cache-dtype fp8_ds_mla"),
    ],
)
def test_what_can_t_be_read_is_refused(backend: str, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LatentFamily().attach("one", mla(backend, **changed), Context(), is_draft=False)


def test_latents_of_another_shape_are_refused() -> None:
    """A level's K/V is written where the rows of one head lie, so the axes have to be known."""
    for shape in ((3, 1, 16, 24), (3, 24)):
        layers = {"one": SimpleNamespace(kv_cache=torch.zeros(shape))}
        with pytest.raises(SeamError, match=re.escape(f"latents of one as {list(shape)}")):
            LatentFamily().state(layers, Any, Any)  # type: ignore[arg-type]


def test_an_output_in_another_format_is_refused() -> None:
    layer = mla()
    layer._vllm_config.compilation_config.pass_config.fuse_attn_quant = True
    with pytest.raises(ConfigError, match="fuse_attn_quant quantizes what layer one returns"):
        LatentFamily().attach("one", layer, Context(), is_draft=False)


@pytest.mark.parametrize(("backend", "ops"), [("CPU_MLA", TORCH), ("TRITON_MLA", TRITON)])
def test_a_layer_is_grafted(backend: str, ops: Any) -> None:
    layer = mla(backend)
    stock = layer.forward_impl
    LatentFamily().attach("one", layer, Context(), is_draft=False)
    found: Any = layer.forward_impl
    assert isinstance(found, TreeLatents)
    assert (found.ops, found.stock) == (ops, stock)


@pytest.mark.parametrize("ops", [TORCH, TRITON])
def test_a_level_of_a_draft_sees_the_prefix_and_its_ancestors(ops: Any) -> None:
    """Levels give what K and V of each head, made of the latents, would give."""
    layer, topk, steps = mla(), 2, 3
    batch = latent_draft_problem(LatentShape(rows=(), prefixes=(20, 0, 33)), topk, steps, 2)
    generator = torch.Generator().manual_seed(3)
    scratch = torch.full((4, steps * topk, 1, RANK + ROPE), float("nan"))
    graft = TreeLatents(layer, Context(mode=VerifyMode.ALL, workspace=None), ops, None, True)  # type: ignore[arg-type]
    rows = 3 * topk
    for level in range(steps):
        query = torch.randn(rows, HEADS, NOPE + ROPE, generator=generator)
        latent = torch.randn(rows, RANK, generator=generator)
        # Rotated parts are a slice of a wider projection.
        rotated = torch.randn(rows, 1, ROPE + 5, generator=generator)[..., 5:]
        metadata = DraftTreeMetadata(
            level, topk, 3, batch.prefix_lens, batch.block_table, batch.ancestors, scratch, 48
        )
        out = torch.full((rows, HEADS * VALUE), 7.0)
        assert graft(query, latent, rotated, batch.latents, metadata, out) is out
        expected = level_expanded(layer, query, batch, scratch, level)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        kept = torch.cat([latent, rotated[:, 0]], -1).view(3, topk, 1, RANK + ROPE)
        assert torch.equal(scratch[:3, level * topk : (level + 1) * topk], kept)
    # Negative control: ancestors of the other branch give other rows.
    batch.ancestors[:, :, 0] = 1 - batch.ancestors[:, :, 0]
    graft(query, latent, rotated, batch.latents, metadata, out)
    assert not torch.allclose(out, expected, atol=1e-3)


def level_expanded(
    layer: Any, q: torch.Tensor, batch: Any, scratch: torch.Tensor, level: int
) -> torch.Tensor:
    """Attention of a level's rows with K and V of each head, made of the latents."""
    out = torch.empty(len(q), HEADS * VALUE)
    for row in range(len(q)):
        r, node = divmod(row, batch.topk)
        slots = torch.arange(int(batch.prefix_lens[r]))
        paged = batch.latents[batch.block_table[r, slots // 16].long(), slots % 16]
        ancestors = batch.ancestors[r, node, : level + 1].long()
        keys = torch.cat([paged, scratch[r, ancestors, 0]])
        nope = torch.einsum("nl,hpl->nhp", keys[:, :RANK], layer.W_UK_T)
        key = torch.cat([nope, keys[:, None, RANK:].expand(-1, HEADS, -1)], dim=-1)
        value = torch.einsum("nl,hlv->nhv", keys[:, :RANK], layer.W_UV)
        logits = torch.einsum("hd,nhd->hn", q[row], key) * layer.scale
        out[row] = torch.einsum("hn,nhv->hv", logits.softmax(-1), value).flatten()
    return out


@pytest.mark.parametrize("mode", [VerifyMode.ALL, VerifyMode.MIXED])
def test_the_first_pass_of_a_draft_is_the_platform_s(mode: VerifyMode) -> None:
    """Its rows are a chain's, while the target's layers have seen trees."""
    context, metadata, (_, cache), query = step(mode)
    out, calls = run(mla(), context, metadata, cache, query, TORCH, is_draft=True)
    assert (calls, (out == STOCK).all()) == ([metadata], True)


def test_a_draft_s_layer_is_told_apart() -> None:
    layer, other = mla(), mla()
    LatentFamily().attach("one", layer, Context(), is_draft=True)
    LatentFamily().attach("two", other, Context(), is_draft=False)
    assert (layer.forward_impl.is_draft, other.forward_impl.is_draft) == (True, False)
    words = "layer one uses CUTLASS_MLA: pass --speculative-config.attention_backend TRITON_MLA"
    with pytest.raises(ConfigError, match=words):
        LatentFamily().attach("one", mla("CUTLASS_MLA"), Context(), is_draft=True)


def test_a_draft_with_latents_has_no_window() -> None:
    LatentFamily().attach("one", mla(), Context(draft_window=64), is_draft=False)
    with pytest.raises(ConfigError, match="over whole texts, but layer one has MLA: drop the key"):
        LatentFamily().attach("one", mla(), Context(draft_window=64), is_draft=True)


def test_the_family_serves_dense_mla_alone() -> None:
    among = families()
    assert isinstance(family_of("one", mla(), among), LatentFamily)
    sparse = mla(impl=SimpleNamespace(is_sparse=True, sliding_window=None))
    with pytest.raises(ConfigError, match="does not support sparse attention, which layer one"):
        family_of("one", sparse, among)
    with pytest.raises(ConfigError, match="does not support sliding-window attention"):
        family_of("one", mla(sliding_window=128), among)


def test_latents_of_the_accepted_path_move_to_the_front() -> None:
    """In both layers, of different formats; the reference is a loop over slots."""
    caches = [
        torch.randn(6, 16, RANK + ROPE, generator=torch.Generator().manual_seed(3)),
        torch.randint(0, 255, (6, 16, RANK + ROPE), dtype=torch.uint8),
    ]
    before = [cache.clone() for cache in caches]
    layers = {name: SimpleNamespace(kv_cache=cache) for name, cache in zip("ab", caches)}
    groups = [SimpleNamespace(layer_names=["draft", "a", "b"])]
    slots = torch.randperm(96, generator=torch.Generator().manual_seed(4))[None, :12]
    state = LatentFamily().state(
        layers,
        SimpleNamespace(kv_cache_groups=groups),  # type: ignore[arg-type]
        SimpleNamespace(slot_mappings=slots),  # type: ignore[arg-type]
    )
    path = torch.zeros(2, 8, dtype=torch.int32)
    path[0, :4] = torch.tensor([0, 2, 3, 7])
    path[1, :2] = torch.tensor([0, 1])
    batch = SimpleNamespace(query_start_loc=torch.tensor([0, 8, 12]).int(), num_reqs=2)
    step: Any = SimpleNamespace(
        batch=batch, num_sampled=torch.tensor([4, 2]).int(), num_drafts=torch.tensor([7, 3]).int()
    )
    state.commit(path, step)
    for cache, old in zip(caches, before, strict=True):
        expected = old.clone().flatten(0, 1)
        for d, node in enumerate((0, 2, 3, 7)):
            expected[slots[0, d]] = old.flatten(0, 1)[slots[0, node]]
        assert torch.equal(cache.flatten(0, 1), expected)
        assert not torch.equal(cache, old)
