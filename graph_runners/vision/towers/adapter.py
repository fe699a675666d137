"""Towers whose models do not speak vLLM's ``SupportsEncoderCudaGraph``.

An adapter is an entry of the hook ``graft_vision_adapters``, named after the model's architecture.
It is asked for while the model is loaded; vLLM then takes the model for one that speaks the
protocol, so capture, memory profiling and clearing go the usual way in both model runners.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.model_executor.models.interfaces import SupportsEncoderCudaGraph
from vllm.v1.worker.encoder_cudagraph_defs import EncoderCudaGraphConfig

from vllm_graft.base.errors import GraftError
from vllm_graft.graph_runners.vision.towers.tower import Inputs, Item, Pieces, Tower

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

_ATTRIBUTE = "_graft_vision_adapter"


class VisionAdapter(Tower):
    """Base of the adapters.

    Attributes:
        model: the loaded model.
    """

    def __init__(self, model: Any, vllm_config: VllmConfig) -> None:
        """Read what is needed once; built before memory is profiled."""
        self.model = model
        self.vllm_config = vllm_config

    @classmethod
    def refuses(cls, model: Any) -> str | None:
        """Why this model, of a right architecture, is not served, as a sentence; None if it is."""
        return None

    @abstractmethod
    def select(self, inputs: Inputs, indices: Sequence[int]) -> dict[str, Any]:
        """Inputs for ``embed_multimodal`` with these items only."""

    def eager(self, inputs: Inputs, indices: Sequence[int]) -> list[torch.Tensor]:
        """What the model's own ``embed_multimodal`` answers."""
        return list(self.model.embed_multimodal(**self.select(inputs, indices)))


class FixedSizeAdapter(VisionAdapter):
    """Towers whose images are resized to one size: CLIP, SigLIP.

    Data is one tensor ``[images, channels, height, width]``; embeddings ``[images, tokens,
    hidden]``. A subclass gives `encode` and, where they differ, the name and the patch size.
    """

    pixels = "pixel_values"
    image_size: tuple[int, int, int] | None = None
    """Channels, height and width of an image; None captures nothing before inputs came."""

    @property
    @abstractmethod
    def patch_size(self) -> int:
        """Side of a patch, in pixels."""

    @abstractmethod
    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Tower and projector: ``[images, channels, height, width]`` to embeddings."""

    def startup(self) -> list[Inputs]:
        """1, 2, 4 and 8 images: their size is known."""
        if self.image_size is None:
            return []
        like = next(self.model.parameters())
        dtype = self.vllm_config.model_config.dtype
        return [
            {self.pixels: like.new_zeros(number, *self.image_size, dtype=dtype)}
            for number in (8, 4, 2, 1)
        ]

    def decline(self, inputs: Inputs) -> str | None:
        """Images of several sizes come as a list, which this tower cannot stack."""
        if reason := super().decline(inputs):
            return reason
        pixels = inputs.get(self.pixels)
        if pixels is None or not hasattr(pixels, "ndim") or pixels.ndim != 4:
            return "not_one_tensor"
        return None

    def items(self, inputs: Inputs) -> list[Item]:
        """All alike."""
        pixels = inputs[self.pixels]
        height, width = pixels.shape[-2:]
        rows = (height // self.patch_size) * (width // self.patch_size)
        layout = (self.pixels, tuple(pixels.shape[1:]), str(pixels.dtype))
        return [Item(layout, rows)] * pixels.shape[0]

    def data(self, inputs: Inputs, indices: Sequence[int]) -> Pieces:
        """One slice where the images follow each other."""
        return {
            self.pixels: row_slices(inputs[self.pixels], [1] * len(inputs[self.pixels]), indices)
        }

    def forward(self, buffers: dict[str, torch.Tensor]) -> torch.Tensor:
        """Encode the whole batch."""
        return self.encode(buffers[self.pixels])

    def split(
        self, output: torch.Tensor, inputs: Inputs, indices: Sequence[int], items: Sequence[Item]
    ) -> list[torch.Tensor]:
        """One embedding matrix an image."""
        return list(output.unbind(0))

    def select(self, inputs: Inputs, indices: Sequence[int]) -> dict[str, Any]:
        """The images at `indices`."""
        return {self.pixels: inputs[self.pixels][list(indices)]}


def row_slices(
    tensor: torch.Tensor, lengths: Sequence[int], indices: Sequence[int]
) -> list[torch.Tensor]:
    """Rows of the items at `indices` as views; neighbours come as one view.

    Args:
        tensor: ``[sum(lengths), ...]``, the items' rows one after the other.
        lengths: rows of each item.
        indices: the items wanted.
    """
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    runs: list[list[int]] = []
    for index in indices:
        start, end = starts[index], starts[index + 1]
        if runs and runs[-1][1] == start:
            runs[-1][1] = end
        else:
            runs.append([start, end])
    return [tensor[start:end] for start, end in runs]


def attach(model: Any, adapter: VisionAdapter) -> None:
    """Make `model`, this instance alone, pass for one that speaks vLLM's protocol.

    vLLM then builds an ``EncoderCudaGraphManager`` for it, which is our runner. The runner talks
    to the adapter; of the protocol only what the manager's constructor asks is answered.

    Raises:
        GraftError: if the model speaks the protocol itself.
    """
    if isinstance(model, SupportsEncoderCudaGraph):
        raise GraftError(f"{type(model).__name__} speaks vLLM's protocol and needs no adapter")

    def config() -> EncoderCudaGraphConfig:
        return EncoderCudaGraphConfig(list(adapter.modalities), [], out_hidden_size=0)

    def budget_range(vllm_config: VllmConfig) -> tuple[int, int]:
        return 1, vllm_config.scheduler_config.max_num_batched_tokens

    answers: dict[str, Any] = {
        "supports_encoder_cudagraph": True,
        "get_encoder_cudagraph_config": config,
        "get_encoder_cudagraph_budget_range": budget_range,
        "get_max_frames_per_video": lambda: 1,
    }
    for name in _PROTOCOL:
        setattr(model, name, answers.get(name) or _unanswered(name))
    setattr(model, _ATTRIBUTE, adapter)


def adapter_of(model: Any) -> VisionAdapter | None:
    """The adapter that :func:`attach` has put on `model`."""
    found: VisionAdapter | None = getattr(model, _ATTRIBUTE, None)
    return found


def _unanswered(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise GraftError(f"{name}() was called on a model that has a vision adapter of vllm-graft")

    return refuse


_PROTOCOL = tuple(name for name in vars(SupportsEncoderCudaGraph) if not name.startswith("_"))
