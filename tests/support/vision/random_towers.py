"""Vision towers of true shapes with random weights, in vLLM's own model classes."""

import contextlib
import hashlib
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

Grid = tuple[int, int, int]
"""Frames (after temporal merging), rows and columns of patches."""

Modality = Literal["image", "video"]


@dataclass(frozen=True)
class Batch:
    """The input of one call of the encoder."""

    modality: Modality
    grids: tuple[Grid, ...]

    @property
    def patches(self) -> int:
        return sum(math.prod(grid) for grid in self.grids)


@dataclass(frozen=True)
class Tower:
    name: str
    family: str
    patch: int
    vision: dict[str, Any]


_QWEN3 = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "out_hidden_size": 4096,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_QWEN25 = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_TINY = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 48}

TOWERS = {
    "qwen3": Tower("qwen3", "qwen3_vl", 16, _QWEN3),
    "qwen2.5": Tower("qwen2.5", "qwen2_5_vl", 14, _QWEN25),
}
"""The towers of Qwen3-VL-8B and Qwen2.5-VL-7B."""


def tiny(tower: Tower) -> Tower:
    """Return the tower with few, small layers, for a CPU; it keeps every feature."""
    vision = {**tower.vision, **_TINY, "depth": 3}
    if tower.family == "qwen3_vl":
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    else:
        vision |= {"fullatt_block_indexes": [1]}
    return Tower(tower.name, tower.family, tower.patch, vision)


@contextlib.contextmanager
def one_rank(config: Any = None) -> Iterator[None]:
    """Set up vLLM's parallel state for a single process, and ``config`` as the current one."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config or VllmConfig()):
        address = f"file://{Path(folder) / 'rendezvous'}"
        init_distributed_environment(1, 0, address, 0, "gloo")
        initialize_model_parallel(1)
        try:
            yield
        finally:
            cleanup_dist_env_and_memory()


def vllm_config(
    dtype: Any,
    graft: dict[str, Any] | None = None,
    shape: object = None,
    compiled: bool = False,
    batched_tokens: int = 8192,
    model_len: int = 32768,
) -> Any:
    """Make a ``VllmConfig`` that holds all that towers and encoder managers read.

    The model's part is a namespace: a real one wants a checkpoint on disk and its tokenizer. All
    else goes through vLLM's own checks, which work out what `compile_mm_encoder` compiles for.
    """
    from vllm.config import CompilationConfig, MultiModalConfig, SchedulerConfig, VllmConfig

    compilation = CompilationConfig(cudagraph_mm_encoder=True, compile_mm_encoder=compiled)
    scheduler = SchedulerConfig.default_factory(
        max_model_len=model_len, max_num_batched_tokens=batched_tokens
    )
    config: Any = VllmConfig(compilation_config=compilation, scheduler_config=scheduler)
    config.additional_config = {"graft": graft} if graft is not None else {}
    digest = hashlib.sha256(repr((shape, dtype)).encode()).hexdigest()
    model = _Model(
        multimodal_config=MultiModalConfig(),
        max_model_len=model_len,
        enforce_eager=False,
        dtype=dtype,
        compute_hash=lambda: digest,
    )
    object.__setattr__(config, "model_config", model)
    return config


class _Model(SimpleNamespace):
    """Stands for a ``ModelConfig`` whose other properties (``is_diffusion``, ...) are off."""

    def __getattr__(self, name: str) -> bool:
        if name.startswith("is_"):
            return False
        raise AttributeError(name)


def build(tower: Tower, config: Any, device: str, dtype: Any) -> Any:
    """Build the model with its tower only and random weights, in ``dtype`` on ``device``."""
    import torch
    from vllm.config import set_current_vllm_config

    stock = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with set_current_vllm_config(config), torch.device(device):
            model = _without_language_model(tower, config)
    finally:
        torch.set_default_dtype(stock)
    _randomise(model)
    return model


def captured(manager: Any, model: Any, config: Any, device: str, dtype: Any) -> Any:
    """Make an encoder manager of this class, and let it capture as the engine does."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import graph_capture
    from vllm.platforms import current_platform

    on_gpu = device != "cpu"
    pool = current_platform.graph_pool_handle() if on_gpu else torch.cuda.graph_pool_handle()
    around = graph_capture(torch.device(device)) if on_gpu else contextlib.nullcontext()
    with set_current_vllm_config(config), torch.inference_mode(), around:
        made = manager(config, torch.device(device), dtype, model)
        made.capture(graph_pool=pool)
    return made


def _without_language_model(tower: Tower, config: Any) -> Any:
    from torch import nn

    vision, model_class, visual_class = classes(tower)

    class TowerOnly(model_class):  # type: ignore[misc, valid-type]
        """The real class without its constructor, which would build the language model too."""

        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.config = SimpleNamespace(vision_config=vision)
            self.model_config = config.model_config
            self.multimodal_config = config.model_config.multimodal_config
            self.use_data_parallel = self.is_multimodal_pruning_enabled = False
            self.visual = visual_class(vision, prefix="visual")

        def get_max_frames_per_video(self) -> int:
            # The real class finds this by its processor, at default limits (999 videos per prompt).
            return 1

    return TowerOnly()


def classes(tower: Tower) -> tuple[Any, Any, Any]:
    """Return the vision configuration, the model's class and the tower's class."""
    if tower.family == "qwen3_vl":
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
        from vllm.model_executor.models.qwen3_vl import (
            Qwen3_VisionTransformer,
            Qwen3VLForConditionalGeneration,
        )

        configuration = Qwen3VLVisionConfig(**tower.vision)
        return configuration, Qwen3VLForConditionalGeneration, Qwen3_VisionTransformer
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from vllm.model_executor.models.qwen2_5_vl import (
        Qwen2_5_VisionTransformer,
        Qwen2_5_VLForConditionalGeneration,
    )

    older = Qwen2_5_VLVisionConfig(**tower.vision)
    return older, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VisionTransformer


def _randomise(model: Any) -> None:
    """Draw normal weights of sigma 1 / sqrt(inputs), norms at one: activations keep their size."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.requires_grad_(False)
            if weight.dim() < 2:
                is_norm = name.endswith("weight")
                weight.fill_(1.0) if is_norm else weight.normal_(std=0.02)
            else:
                weight.normal_(std=weight[0].numel() ** -0.5)
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(module)


class Pixels:
    """Random pixels on the device, cut to size; drawing anew would take longer than the tower."""

    def __init__(self, tower: Tower, most: int, device: str, dtype: Any) -> None:
        import torch

        self.width = 3 * 2 * tower.patch**2
        generator = torch.Generator(device=device).manual_seed(1)
        shape = (most + 64, self.width)
        self._pool = torch.randn(shape, generator=generator, device=device, dtype=dtype)

    def of(self, batch: Batch, shift: int = 0) -> dict[str, Any]:
        """Make keyword arguments of ``embed_multimodal``; another ``shift`` gives other pixels."""
        import torch

        start = shift % 64
        if start + batch.patches > len(self._pool):
            raise ValueError(f"{batch.patches} patches, of {len(self._pool)} that are there")
        pixels = self._pool[start : start + batch.patches]
        names = ("pixel_values", "image_grid_thw")
        if batch.modality == "video":
            names = ("pixel_values_videos", "video_grid_thw")
        return dict(zip(names, (pixels, torch.tensor(batch.grids))))
