"""An output head in FP8, alone and as a draft's head."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_graft.base import info
from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.drafters.tree_drafting import TreeDrafting
from vllm_graft.spec_decode.heads import fp8_head
from vllm_graft.spec_decode.heads.fp8_head import FLAG, FP8, Fp8Head, quantize
from vllm_graft.spec_decode.heads.head import DraftHead

VOCAB, HIDDEN, TOPK = 96, 64, 4
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def numbers(*shape: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return torch.randn(*shape, generator=generator).to(device, dtype)


def make_draft(
    monkeypatch: pytest.MonkeyPatch, weight: torch.Tensor, ids: list[int] | None = None, **kw: Any
) -> Any:
    """Make a draft with vLLM's own logits processor."""
    from vllm.model_executor.layers import logits_processor

    # vLLM has a current configuration only while an engine starts.
    config = SimpleNamespace(model_config=SimpleNamespace(head_dtype=kw.pop("head_dtype", None)))
    monkeypatch.setattr(logits_processor, "get_current_vllm_config", lambda: config)
    processor = logits_processor.LogitsProcessor(kw.pop("vocab", len(weight)), **kw)
    unquantised = SimpleNamespace(
        apply=lambda layer, hidden, bias=None: hidden @ layer.weight.t().to(hidden.dtype)
    )
    head = SimpleNamespace(weight=weight, tp_size=1, quant_method=unquantised)
    draft = SimpleNamespace(lm_head=head, logits_processor=processor)
    draft.compute_logits = lambda hidden: processor(head, hidden)
    if ids is not None:
        draft.draft_id_to_target_id = torch.tensor(ids) - torch.arange(len(ids))
    return draft


def test_rows_are_within_a_step_of_e4m3() -> None:
    rows = numbers(7, 512) * torch.logspace(-9, 6, 7)[:, None]
    found, scale = quantize(rows)
    assert found.dtype == FP8
    assert scale.shape == (7, 1)
    # With three bits of mantissa, half a step is 1/16 of the number, or of the smallest normal.
    allowed = (rows.abs() / 16).clamp(min=2.0**-6 / 16 * scale)
    assert ((found.float() * scale - rows).abs() <= allowed * 1.001).all()
    assert (found.float().abs().amax(1) == torch.finfo(FP8).max).all()


def test_rows_of_nothing_have_no_nan() -> None:
    found, scale = quantize(torch.zeros(3, 16))
    assert torch.equal(found.float() * scale, torch.zeros(3, 16))


def test_weights_are_quantised_in_parts_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = numbers(VOCAB, HIDDEN)
    whole = Fp8Head(weight)
    monkeypatch.setattr(fp8_head, "_CHUNK", 7 * HIDDEN)
    parts = Fp8Head(weight)
    assert torch.equal(whole.weight.view(torch.uint8), parts.weight.view(torch.uint8))
    assert torch.equal(whole.scale, parts.scale)
    assert whole.num_bytes == VOCAB * (HIDDEN + 4)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("rows", [1, 8, 130])
def test_logits_are_nearly_those_of_the_rows(device: str, rows: int) -> None:
    weight = numbers(320, 256, device=device)
    hidden = 50 * numbers(rows, 256, seed=1, device=device)
    logits = Fp8Head(weight).apply(None, hidden).double()
    expected = hidden.double() @ weight.double().t()
    error = (logits - expected).norm() / expected.norm()
    # Both factors are rounded to three bits, an error of 2.6 % (RMS) each.
    assert 0.001 < error < 0.05
    exact = fp8_head._emulated(hidden, *quantize(weight)).double()
    assert (logits - exact).norm() / exact.norm() < 0.005


def test_a_bias_is_added() -> None:
    head, hidden = Fp8Head(numbers(VOCAB, HIDDEN)), numbers(3, HIDDEN, seed=1)
    bias = numbers(VOCAB, seed=2)
    assert torch.equal(head.apply(head, hidden, bias), head.apply(head, hidden) + bias)


@pytest.mark.parametrize("options", [{}, {"scale": 0.5, "soft_cap": 2.0}, {"vocab": VOCAB - 7}])
def test_the_draft_chooses_by_it(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, float]
) -> None:
    draft = make_draft(monkeypatch, numbers(VOCAB, HIDDEN), **options)
    head, hidden = DraftHead(draft, TOPK, fp8=True), numbers(5, HIDDEN, seed=1)
    plain = DraftHead(draft, TOPK).logits(hidden)
    logits = head.logits(hidden)
    assert logits.shape == plain.shape
    assert not torch.equal(logits, plain)
    assert (logits - plain).norm() < 0.1 * plain.norm()
    assert torch.equal(draft.compute_logits(hidden), plain), "the loaded head stays as it is"


def test_a_draft_s_own_vocabulary_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [3 * row + 2 for row in range(VOCAB)]
    draft = make_draft(monkeypatch, numbers(VOCAB, HIDDEN), ids)
    hidden = numbers(5, HIDDEN, seed=1)
    head = DraftHead(draft, TOPK, fp8=True)
    _, tokens = head.top(hidden)
    best = head.logits(hidden).topk(TOPK).indices
    assert tokens.tolist() == (3 * best + 2).tolist()


def test_hot_tokens_of_a_file_are_quantised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ids = [1, 5, 8, 40, 41, 95]
    file = tmp_path / "hot.json"
    file.write_text(json.dumps(ids))
    draft = make_draft(monkeypatch, numbers(VOCAB, HIDDEN), scale=0.5)
    hot = DraftHead(draft, TOPK, str(file), fp8=True)
    whole = DraftHead(draft, TOPK, fp8=True)
    hidden = numbers(5, HIDDEN, seed=1)
    assert torch.equal(hot.logits(hidden), whole.logits(hidden)[:, ids])
    assert hot.hot_weight is None
    assert set(hot.top(hidden)[1].flatten().tolist()) <= set(ids)


def test_a_learned_vocabulary_is_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    head = DraftHead(make_draft(monkeypatch, numbers(VOCAB, HIDDEN)), TOPK, 16, fp8=True)
    hidden = numbers(5, HIDDEN, seed=1)
    torch.testing.assert_close(head.logits(hidden, narrow=True), head.logits(hidden)[:, :16])


def test_ranks_gather_their_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers import logits_processor

    weight, hidden = numbers(VOCAB, HIDDEN), numbers(5, HIDDEN, seed=1)
    whole = Fp8Head(weight).apply(None, hidden)
    draft = make_draft(monkeypatch, weight[: VOCAB // 2], vocab=VOCAB - 3)
    draft.lm_head.tp_size = 2
    gathered: list[torch.Tensor] = []

    def gather(logits: torch.Tensor) -> torch.Tensor:
        gathered.append(logits)
        return whole

    for name in ("tensor_model_parallel_all_gather", "tensor_model_parallel_gather"):
        monkeypatch.setattr(logits_processor, name, gather)
    logits = DraftHead(draft, TOPK, fp8=True).logits(hidden)
    assert torch.equal(gathered[0], whole[:, : VOCAB // 2])
    assert torch.equal(logits, whole[:, : VOCAB - 3])


def refusal(draft: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        DraftHead(draft, TOPK, fp8=True)
    return str(caught.value)


def test_a_quantised_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = make_draft(monkeypatch, numbers(VOCAB, HIDDEN).to(torch.int8))
    assert refusal(draft).startswith(f"{FLAG} needs an unquantised output head, but this one is")


def drafter_of(draft: Any, tree: dict[str, Any], *, by_preset: bool) -> Any:
    """What loads a draft for a tree that somebody asks for, or a preset."""
    decided = {"preset": "auto", "on": {"tree": "trees"}, "off": {}}
    graft: dict[str, Any] = {"tree": tree, "decided": decided} if by_preset else {"tree": tree}
    trees = SimpleNamespace(
        shape=SimpleNamespace(topk=TOPK),
        config=TreeConfig(**tree),
        engine_config=SimpleNamespace(additional_config={"graft": graft}),
    )
    model_config = SimpleNamespace(get_vocab_size=lambda: VOCAB)
    vllm_config = SimpleNamespace(model_config=model_config)
    return SimpleNamespace(
        model=draft,
        trees=trees,
        vllm_config=vllm_config,
        draft_model_config=SimpleNamespace(model="draft"),
    )


@pytest.fixture
def declined() -> Iterator[Callable[[], dict[str, str]]]:
    info.clear()
    yield info.declined
    info.clear()


@pytest.mark.parametrize("by_preset", [True, False])
@pytest.mark.parametrize(
    ("bias", "words", "kept"),
    [
        # Hot tokens don't need FP8.
        (False, "--hf-overrides says", {"tree.head_dtype"}),
        (True, "without bias", {"tree.head_dtype", "tree.hot_tokens"}),
    ],
)
def test_a_preset_keeps_a_head_that_has_no_fp8_or_can_t_be_cut(
    monkeypatch: pytest.MonkeyPatch,
    declined: Callable[[], dict[str, str]],
    bias: bool,
    words: str,
    kept: set[str],
    by_preset: bool,
) -> None:
    options: dict[str, Any] = {} if bias else {"head_dtype": torch.float64}
    draft = make_draft(monkeypatch, numbers(VOCAB, HIDDEN), **options)
    if bias:
        draft.lm_head.bias = torch.zeros(VOCAB)
    drafter = drafter_of(draft, {"head_dtype": "fp8", "hot_tokens": 16}, by_preset=by_preset)
    if not by_preset:
        with pytest.raises(ConfigError, match=words):
            TreeDrafting.make_head(drafter)
        assert declined() == {}
        return
    head = TreeDrafting.make_head(drafter)
    assert head.fp8 is None
    assert (head.learned is None) is bias
    assert words in declined()["tree.head_dtype"]
    assert set(declined()) == kept


def test_a_head_of_another_dtype_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = make_draft(monkeypatch, numbers(VOCAB, HIDDEN), head_dtype=torch.float64)
    message = refusal(draft)
    assert f"{FLAG} is 'fp8', but --hf-overrides says" in message
    assert "torch.float64" in message


def test_a_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.quantization.utils import w8a8_utils

    monkeypatch.setattr(w8a8_utils, "cutlass_fp8_supported", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ConfigError, match="A100 has no product of FP8 numbers"):
        fp8_head._product(torch.device("cuda"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_product_is_asked_for_16_bits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    from vllm import _custom_ops

    def product(a: Any, b: Any, scale_a: Any, scale_b: Any, out_dtype: torch.dtype) -> torch.Tensor:
        assert out_dtype in (torch.bfloat16, torch.float16), "as vLLM's own demands"
        return ((a.float() @ b.float()) * scale_a * scale_b.t()).to(out_dtype)

    monkeypatch.setattr(_custom_ops, "cutlass_scaled_mm", product)
    monkeypatch.setattr(_custom_ops, "scaled_fp8_quant", lambda x, **_: quantize(x))
    hidden, rows = numbers(5, HIDDEN).to(dtype), numbers(VOCAB, HIDDEN, seed=1)
    found = fp8_head._by_cutlass(hidden, *quantize(rows))
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), hidden.float() @ rows.t(), atol=2.0, rtol=0.1)
