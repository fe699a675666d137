"""vLLM's own Qwen VL code with tiny random towers, and a runner over them."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.config import CompilationConfig, VllmConfig
from vllm.model_executor.models import qwen3_vl

from tests.support.vision.fake_backend import FakeBackend
from tests.support.vision.random_towers import TOWERS, Grid, classes, one_rank, tiny
from vllm_graft.graph_runners.vision import replay_plan
from vllm_graft.graph_runners.vision import runner as runner_module
from vllm_graft.graph_runners.vision.capture.graph_backend import GraphBackend
from vllm_graft.graph_runners.vision.graphs.vision_batch import VisionBatch
from vllm_graft.graph_runners.vision.runner import ViTCudaGraphRunner

FEATURES = {"qwen3": 3 * 2 * 4 * 4, "qwen2_5": 3 * 2 * 14 * 14}
"""Channels, frames and pixels of a patch."""

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"patch_size": 4}),
    "qwen2_5": ("qwen2.5", {"depth": 4, "fullatt_block_indexes": [1, 3]}),
}
"""The tower, and what differs from its tiny shape."""


@contextlib.contextmanager
def engine_state() -> Iterator[None]:
    """The state of one rank that layers ask for while they are built."""
    config = VllmConfig(compilation_config=CompilationConfig(mode=0))
    native = mock.patch.object(qwen3_vl, "HAS_TRITON", False)  # Interpreted, it takes seconds.
    with native, one_rank(config):
        yield


def make_model(kind: str, width: int = 64) -> Any:
    """The model's own class with its vision tower only, its blocks `width` columns wide."""
    torch.manual_seed(0)
    name, changes = KINDS[kind]
    shape = tiny(TOWERS[name])
    vision, model_class, visual_class = classes(
        replace(shape, vision={**shape.vision, "hidden_size": width, **changes})
    )
    model = model_class.__new__(model_class)
    torch.nn.Module.__init__(model)
    model.visual = _randomised(visual_class(vision))
    model.is_multimodal_pruning_enabled = False
    model.use_data_parallel = False
    model.get_max_frames_per_video = lambda: 1
    model.model_config = SimpleNamespace(max_model_len=2048)
    return model


def _randomised(tower: Any) -> Any:
    for name, parameter in tower.named_parameters():
        one = name.endswith("weight") and ("norm" in name or "ln_q" in name)
        parameter.data.normal_(1.0 if one else 0.0, 0.05)
        parameter.requires_grad_(False)
    for layer in tower.modules():
        method: Any = getattr(layer, "quant_method", None)
        if hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(layer)
    return tower


def make_config(vit: dict[str, Any] | None = None, **compilation: Any) -> Any:
    """What the runner reads of a VllmConfig."""
    options = {
        "encoder_cudagraph_token_budgets": [],
        "encoder_cudagraph_max_vision_items_per_batch": 0,
        "encoder_cudagraph_max_frames_per_batch": None,
        **compilation,
    }
    multimodal = SimpleNamespace(get_limit_per_prompt=lambda _: 999, mm_encoder_tp_mode="weights")
    return SimpleNamespace(
        additional_config={"graft": {"vit": vit or {}}},
        compilation_config=SimpleNamespace(**options),
        model_config=SimpleNamespace(multimodal_config=multimodal, max_model_len=2048),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
        lora_config=None,
    )


def fake_backend(backend: type[GraphBackend] = FakeBackend) -> Any:
    """Capture on the CPU."""
    return mock.patch.object(runner_module, "make_backend", backend)


def runner_of(
    model: Any, config: Any, backend: type[GraphBackend] = FakeBackend
) -> ViTCudaGraphRunner:
    with fake_backend(backend):
        return ViTCudaGraphRunner(config, torch.device("cpu"), torch.float32, model)


def make_runner(
    model: Any, vit: dict[str, Any] | None = None, capture: bool = True, **compilation: Any
) -> ViTCudaGraphRunner:
    """A runner as the engine builds it, captured unless told not to."""
    runner = runner_of(model, make_config(vit, **compilation))
    if capture:
        runner.capture("pool")
    return runner


@torch.inference_mode()
def prewarm(runner: ViTCudaGraphRunner, inputs: Any) -> dict[Any, str]:
    """Capture the exact graphs of these inputs now, whatever their counts and the rate.

    Returns ``captured`` per exact graph, or why there is none.
    """
    batch = VisionBatch.read(runner.tower, inputs)
    groups = replay_plan.groups(batch.items, runner.startup.max_rows)
    for group in groups:
        if group.key not in runner.store.exact and group.key not in runner.admission.refused:
            runner.captures.capture(group, batch)
    return {group.key: runner.admission.refused.get(group.key, "captured") for group in groups}


def batch(kind: str, grids: Sequence[Grid], modality: str = "image", seed: int = 0) -> Any:
    """Keyword arguments as the engine gives them."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(t * h * w for t, h, w in grids)
    pixels = torch.randn(rows, FEATURES[kind], generator=generator)
    suffix = "" if modality == "image" else "_videos"
    return {f"pixel_values{suffix}": pixels, f"{modality}_grid_thw": torch.tensor(grids)}


@torch.inference_mode()
def eager(model: Any, inputs: Any) -> list[torch.Tensor]:
    """The engine's own path."""
    return list(model.embed_multimodal(**inputs))


def agree(found: Any, expected: Any, exact: bool = False) -> bool:
    """Whether a batch was answered, each item as expected: nearly, or bit for bit."""
    near = torch.equal if exact else functools.partial(torch.allclose, atol=1e-5)
    return found is not None and len(found) == len(expected) and all(map(near, found, expected))


def right(runner: Any, inputs: Any, exact: bool = False) -> bool:
    """Whether a runner answers a batch as the engine's own path does."""
    return agree(runner.execute(inputs), eager(runner.model, inputs), exact)
