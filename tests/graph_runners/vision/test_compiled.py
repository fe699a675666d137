"""Recorded graphs of a tower whose parts vLLM compiles (``compile_mm_encoder``)."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

from tests.support.vision import random_towers as towers
from tests.support.vision import standins
from tests.support.vision.random_towers import Batch
from tests.support.vision.towers import prewarm, right
from vllm_graft.graph_runners.vision.runner import ViTCudaGraphRunner

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")

COMPILED: Any = {"compiled": True, "batched_tokens": 128, "model_len": 128}
TINY = towers.tiny(towers.TOWERS["qwen3"])
SHAPE = replace(TINY, vision={**TINY.vision, "depth": 2, "deepstack_visual_indexes": [0]})


@pytest.fixture(scope="module")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's own compilation as on a GPU; on a CPU vLLM would use ``torch.compile`` alone."""
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def as_on_a_gpu(cls: Any, config: Any) -> None:
        compilation = config.compilation_config
        kept = {name: getattr(compilation, name) for name in ("mode", "backend")}
        stock(cls, config)
        for name, value in kept.items():
            setattr(compilation, name, value)
        compilation.ir_enable_torch_wrap = True
        compilation.post_init_cudagraph_sizes()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("compiled")))
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(as_on_a_gpu))
        # This pass asks for operators that only the CUDA build has.
        patch.setattr(FixFunctionalizationPass, "__call__", lambda self, graph: None)
        with towers.one_rank(), standins.cpu():
            yield


@pytest.fixture(scope="module")
def tower(compiling: None) -> Any:
    config = towers.vllm_config(torch.float32, None, SHAPE, **COMPILED)
    return towers.build(SHAPE, config, "cpu", torch.float32)


def captured(manager: Any, tower: Any, graft: dict[str, Any] | None = None) -> Any:
    config = towers.vllm_config(torch.float32, graft, **COMPILED)
    return towers.captured(manager, tower, config, "cpu", torch.float32)


@pytest.mark.nightly
def test_graphs_of_a_compiled_tower_are_its_eager_pass(tower: Any) -> None:
    blocks = [module for module in tower.visual.blocks if not module.do_not_compile]
    assert len(blocks) == SHAPE.vision["depth"]
    ours = captured(ViTCudaGraphRunner, tower, {"vit": {"buckets": [128], "max_patches": 256}})
    pixels = towers.Pixels(SHAPE, 512, "cpu", torch.float32)
    batches = [
        Batch("image", ((1, 8, 8),)),
        Batch("image", ((1, 4, 16), (1, 4, 16))),
        Batch("video", ((3, 4, 4),)),
    ]
    for batch in batches:
        prewarm(ours, pixels.of(batch))
    for shift in range(2):
        for batch in batches:
            assert right(ours, pixels.of(batch, shift), exact=True)
    assert right(ours, pixels.of(Batch("image", ((1, 4, 8), (1, 6, 10)))))
    found = ours.report()
    assert found["replays"] == {"exact": 6, "bucket": 1}
    assert found["failures"] == []
    # Every part was compiled once, for all of these shapes.
    assert all(block.aot_compiled_fn is not None for block in blocks)


@pytest.mark.nightly
def test_stock_graphs_capture_it_too(tower: Any) -> None:
    # The recorder does not see what compiled code does, so only a GPU shows whether it is right.
    stock = captured(EncoderCudaGraphManager, tower)
    assert 128 in stock.budget_graphs["default"]


def test_another_tower_compiles_under_another_hash() -> None:
    other = towers.tiny(towers.TOWERS["qwen2.5"])
    hashes = {
        towers.vllm_config(torch.float32, None, shape, **COMPILED).compute_hash()
        for shape in (SHAPE, other, towers.TOWERS["qwen3"])
    }
    assert len(hashes) == 3
