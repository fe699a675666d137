"""Adapters: towers of models that do not speak vLLM's ``SupportsEncoderCudaGraph``. An adapter is
an entry of the hook ``graft_vision_adapters``, named after the model's architecture. Once it is
attached, vLLM takes the model for one that speaks the protocol, so both model runners profile,
capture and clear as usual."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import SupportsEncoderCudaGraph
from vllm.v1.worker.encoder_cudagraph_defs import EncoderCudaGraphConfig

from vllm_graft.base.errors import GraftError
from vllm_graft.graph_runners.vision.towers.tower import Inputs, Item, Pieces, Tower
from vllm_graft.seams.permission import require_seams

_ATTRIBUTE = "_graft_vision_adapter"


class VisionAdapter(Tower):
    """Base of the adapters of a loaded model; it is built before memory is profiled. Raises
    `SeamError` if the installed vLLM differs in one of the adapter's `seams`."""

    seams = ""
    """The room of the ledger whose symbols the adapter needs, if any."""

    def __init__(self, model: Any, vllm_config: VllmConfig) -> None:
        if self.seams:
            require_seams(self.seams)
        self.model, self.vllm_config = model, vllm_config

    @classmethod
    def refuses(cls, model: Any) -> str | None:
        """Why a model of the adapter's architecture is not served, as a clause; None if it is."""
        return None

    @abstractmethod
    def select(self, inputs: Inputs, indices: Sequence[int]) -> dict[str, Any]:
        """Keyword arguments of ``embed_multimodal`` with these items only."""

    def eager(self, inputs: Inputs, indices: Sequence[int]) -> list[torch.Tensor]:
        return list(self.model.embed_multimodal(**self.select(inputs, indices)))


class FixedSizeAdapter(VisionAdapter):
    """A tower whose images are all resized to one size, such as CLIP or SigLIP. Data are one tensor
    ``[images, channels, height, width]``, and embeddings are ``[images, tokens, hidden]``. A
    subclass gives `encode` and `patch_size`, and sets the attributes below."""

    pixels = "pixel_values"
    """The keyword argument that holds the images."""
    image_size: tuple[int, int, int] | None = None
    """Channels, height and width of an image; with None nothing is captured at the start."""

    @property
    @abstractmethod
    def patch_size(self) -> int:
        """Side of a patch, in pixels."""

    @abstractmethod
    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Run tower and projector: ``[images, tokens, hidden]``."""

    def startup(self) -> list[Inputs]:
        if self.image_size is None:
            return []
        like = next(self.model.parameters())
        dtype = self.vllm_config.model_config.dtype
        return [
            {self.pixels: like.new_zeros(number, *self.image_size, dtype=dtype)}
            for number in (8, 4, 2, 1)
        ]

    def decline(self, inputs: Inputs) -> str | None:
        """Decline images of several sizes, which come as a list that cannot be stacked."""
        if reason := super().decline(inputs):
            return reason
        pixels = inputs.get(self.pixels)
        if pixels is None or not hasattr(pixels, "ndim") or pixels.ndim != 4:
            return "not_one_tensor"
        return None

    def items(self, inputs: Inputs) -> list[Item]:
        pixels = inputs[self.pixels]
        height, width = pixels.shape[-2:]
        rows = (height // self.patch_size) * (width // self.patch_size)
        layout = (self.pixels, tuple(pixels.shape[1:]), str(pixels.dtype))
        return [Item(layout, rows)] * pixels.shape[0]

    def data(self, inputs: Inputs, indices: Sequence[int]) -> Pieces:
        return {
            self.pixels: row_slices(inputs[self.pixels], [1] * len(inputs[self.pixels]), indices)
        }

    def forward(self, buffers: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.encode(buffers[self.pixels])

    def split(
        self, output: torch.Tensor, inputs: Inputs, indices: Sequence[int], items: Sequence[Item]
    ) -> list[torch.Tensor]:
        return list(output.unbind(0))

    def select(self, inputs: Inputs, indices: Sequence[int]) -> dict[str, Any]:
        return {self.pixels: inputs[self.pixels][list(indices)]}


def row_slices(
    tensor: torch.Tensor, lengths: Sequence[int], indices: Sequence[int]
) -> list[torch.Tensor]:
    """The rows of some items as views of a tensor; neighbours are one view. The tensor is
    ``[sum(lengths), ...]``, the rows of all items one after the other."""
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
    """Make this instance of a model pass for one that speaks vLLM's protocol: it gets methods. vLLM
    then builds an ``EncoderCudaGraphManager`` for it, which is our runner. The runner uses the
    adapter, so the model answers only the protocol's methods that the manager's constructor calls.
    Raises `GraftError` if the model speaks the protocol itself."""
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
    """The adapter that :func:`attach` has put on `model`; None if there is none."""
    found: VisionAdapter | None = getattr(model, _ATTRIBUTE, None)
    return found


def _unanswered(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise GraftError(f"{name}() was called on a model that has a vision adapter of vllm-graft")

    return refuse


_PROTOCOL = tuple(name for name in vars(SupportsEncoderCudaGraph) if not name.startswith("_"))
