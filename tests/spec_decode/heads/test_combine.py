"""A quantised `fc` of a draft."""

from __future__ import annotations

from types import SimpleNamespace

from vllm_graft.spec_decode.heads.fp8_head import quantize_by_kernel


def test_a_quantised_fc_uses_the_kernel() -> None:
    op = SimpleNamespace(_forward_method="compiled", forward_cuda="kernel")
    method = SimpleNamespace(fp8_linear=SimpleNamespace(quant_fp8=op))
    fc = SimpleNamespace(quant_method=method)
    assert quantize_by_kernel(SimpleNamespace(model=SimpleNamespace(fc=fc)))
    assert op._forward_method == "kernel"


def test_other_drafts_stay_as_they_are() -> None:
    plain = SimpleNamespace(fc=SimpleNamespace(quant_method=object()))
    for draft in (SimpleNamespace(), SimpleNamespace(model=SimpleNamespace()), plain):
        assert not quantize_by_kernel(draft)
    assert not quantize_by_kernel(SimpleNamespace(model=plain))
