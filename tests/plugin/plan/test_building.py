"""Models that are built on no device: `test_plan` has whole ones."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from vllm_graft.plan import building


def test_positions_and_frequencies_may_meet() -> None:
    """Whole numbers stay on the CPU, as their elements are looked for."""
    with building._on_meta():
        positions = torch.arange(4, dtype=torch.int32)
        frequencies = torch.ones(3, device="cuda")
        product = positions[:, None] * frequencies
    assert (positions.device.type, frequencies.device.type) == ("cpu", "meta")
    assert (product.device.type, product.shape) == ("meta", (4, 3))


class Fp8PerTensorOnlineLinearMethod:
    uses_meta_device = True


class Mxfp4OnlineMoEMethod(Fp8PerTensorOnlineLinearMethod):
    pass


def test_weights_that_are_quantized_while_they_load() -> None:
    model = torch.nn.ModuleDict({"eight": torch.nn.Linear(64, 32, bias=False)})
    model["four"], model["stored"] = torch.nn.Module(), torch.nn.Linear(64, 32, bias=False)
    model["four"].w13_weight = torch.nn.Parameter(torch.zeros(2, 64, 32))
    model["eight"].quant_method = Fp8PerTensorOnlineLinearMethod()  # type: ignore[assignment]
    model["four"].quant_method = Mxfp4OnlineMoEMethod()  # type: ignore[assignment]
    # A checkpoint in FP8 has its sizes already.
    model["stored"].quant_method = SimpleNamespace(uses_meta_device=False)  # type: ignore[assignment]
    weights = {name: (tuple(each.shape), each.nbytes) for name, each in model.named_parameters()}
    assert dict(building._quantized(model, weights)) == {
        "eight.weight": ((32, 64), 32 * 64),
        "four.w13_weight": ((2, 64, 32), 2 * 64 * 32 // 2 + 2 * 64),
    }
