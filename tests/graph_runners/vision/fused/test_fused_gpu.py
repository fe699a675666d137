"""On a real device, fused kernels have the bits of the operators that they replace."""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vllm_graft.graph_runners.vision.fused import bit_check as check
from vllm_graft.graph_runners.vision.fused.blocks import FusedBlocks
from vllm_graft.graph_runners.vision.fused.norm_kernel import add_layer_norm, add_rms_norm

pytestmark = pytest.mark.gpu

ROWS = [16, 17, 64, 196, 785, 3136, 9001]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def noise(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    values = 3 * torch.randn(*shape, device="cuda", generator=generator) + 0.3
    # Vision towers have some columns with large values.
    values[..., ::97] *= 30
    return values.to(dtype)


def same(found: Any, expected: Any) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [128, 520, 1024, 1152, 1280, 1536])
def test_layer_norm(width: int, dtype: torch.dtype) -> None:
    weight, bias = noise(width, dtype=dtype), noise(width, dtype=dtype)
    for rows in [1, 3, *ROWS]:
        x, other = noise(rows, width, dtype=dtype), noise(rows, width, dtype=dtype) / 2
        for added in (None, other):
            total = x if added is None else x + added
            expected = F.layer_norm(total, (width,), weight, bias, 1e-6)
            normed, found = add_layer_norm(x, added, weight, bias, 1e-6)
            assert torch.equal(found, total), rows
            assert torch.equal(normed, expected), rows
    # Negative control: another epsilon gives other bits.
    assert not torch.equal(normed, F.layer_norm(total, (width,), weight, bias, 1e-2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1152, 1280])
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    from vllm.ir.ops.layernorm import fused_add_rms_norm, rms_norm

    alone, added = (op.impls["native"].impl_fn for op in (rms_norm, fused_add_rms_norm))
    weight = noise(width, dtype=dtype)
    for rows in ROWS:
        x, other = noise(rows, width, dtype=dtype), noise(rows, width, dtype=dtype) / 2
        normed, _ = add_rms_norm(x, None, weight, 1e-6, False)
        assert torch.equal(normed, alone(x, weight, 1e-6)), rows
        normed, total = add_rms_norm(x, other, weight, 1e-6, False)
        expected, summed = added(x.clone(), other.clone(), weight, 1e-6)
        assert torch.equal(total, summed), rows
        assert torch.equal(normed, expected), rows
        normed, total = add_rms_norm(x, other, weight, 1e-6, True)
        assert torch.equal(total, x + other), rows
        assert torch.equal(normed, alone(x + other, weight, 1e-6)), rows
    assert not torch.equal(normed, alone(x + other, weight, 1e-2))


@pytest.fixture(scope="module", params=["qwen3", "qwen2.5"])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A tower of the real widths, with four blocks."""
    from tests.support.vision.random_towers import TOWERS, build, one_rank, vllm_config

    shape = TOWERS[request.param]
    names = {"deepstack_visual_indexes", "fullatt_block_indexes"} & shape.vision.keys()
    vision = {**shape.vision, "depth": 4, **{name: [0, 2] for name in names}}
    shape = replace(shape, vision=vision)
    with one_rank():
        config = vllm_config(torch.bfloat16, None, shape)
        made = build(shape, config, "cuda", torch.bfloat16)
        with contextlib.ExitStack() as after:
            after.callback(torch.cuda.empty_cache)
            after.callback(gc.collect)
            yield made
            del made


@torch.inference_mode()
def test_blocks(model: Any) -> None:
    found = check.agreed_blocks(model)
    assert isinstance(found, FusedBlocks), found
    assert found.parts == "rotation, norms, gates"
    for rows in (4, 12, 16, 60, 196, 324, 1000, 2500, 6400):
        x, attention = check._noise(model.visual.blocks[0], rows)
        expected = check._outputs(model.visual.blocks, x, attention)
        with found.installed():
            ours = check._outputs(model.visual.blocks, x, attention)
        assert same(ours, expected), rows


@torch.inference_mode()
def test_a_tower_in_a_graph(model: Any) -> None:
    """The bits stay the same while mergers of inner layers run on a stream beside the blocks."""
    from tests.support.vision.random_towers import TOWERS, Batch, Pixels, captured, vllm_config
    from tests.support.vision.towers import eager, prewarm
    from vllm_graft.graph_runners.vision.runner import ViTCudaGraphRunner

    deep = hasattr(model.visual, "deepstack_merger_list")
    shape = TOWERS["qwen3" if deep else "qwen2.5"]
    config = vllm_config(torch.bfloat16, {"vit": {"buckets": [], "fuse": True}})
    ours = captured(ViTCudaGraphRunner, model, config, "cuda", torch.bfloat16)
    assert ("aside" in ours.report()["fused"]) is deep
    pixels = Pixels(shape, 8192, "cuda", torch.bfloat16)
    for side in (4, 14, 28, 32, 46):
        inputs = pixels.of(Batch("image", ((1, side, side),)))
        prewarm(ours, inputs)
        expected = eager(model, inputs)
        for _ in range(20):
            assert same(ours.execute(inputs) or [], expected), side
    for grids in (((1, 72, 72),), ((1, 90, 90), (1, 4, 4))):
        inputs = pixels.of(Batch("image", grids))
        found = ours.tower.eager_fused(inputs, range(len(grids)))
        assert same(found, eager(model, inputs)), grids
    assert ours.report()["failures"] == []
    ours.clear()
