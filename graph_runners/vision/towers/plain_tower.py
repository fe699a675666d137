"""The tower of a model that is known only through vLLM's encoder protocol."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.worker.encoder_cudagraph_defs import EncoderCudaGraphConfig

from vllm_graft.graph_runners.vision.towers.tower import Buffers, Inputs, Item, Pieces, Tower


class PlainTower(Tower):
    """A tower that computes and copies all its buffers at each replay. The protocol promises that a
    graph depends on these buffers alone. If an encoder has several paths, the paths that a batch
    uses are captured together."""

    def __init__(
        self, model: Any, config: EncoderCudaGraphConfig, max_items: int, max_frames: int
    ) -> None:
        self._model = model
        self._paths = tuple(config.paths)
        self._axes = bool(config.capture_axes)
        self._limits = max_items, max_frames
        self.modalities = tuple(config.modalities)

    def decline(self, inputs: Inputs) -> str | None:
        """Also decline all inputs of models that need several graphs per size (capture axes)."""
        return "capture_axes" if self._axes else super().decline(inputs)

    def items(self, inputs: Inputs) -> list[Item]:
        """One item per input; its layout is the sizes that the protocol tells."""
        modality = self._model.get_input_modality(inputs)
        return [
            Item((modality, spec.input_size, *self._tokens(spec)), spec.input_size)
            for spec in self._model.get_encoder_cudagraph_item_specs(inputs)
        ]

    def data(self, inputs: Inputs, indices: Sequence[int]) -> Pieces:
        chosen = self._select(inputs, indices)
        pieces: Pieces = {}
        for path in self._used(chosen):
            prepared = self._model.prepare_encoder_cudagraph_replay_buffers(
                chosen, *self._limits, path
            )
            for name, value in prepared.values.items():
                if value is not None:
                    pieces[f"{path}/{name}"] = [value]
        return pieces

    def forward(self, buffers: Buffers) -> Any:
        paths: dict[str, Buffers] = {}
        for name, buffer in buffers.items():
            path, _, key = name.partition("/")
            paths.setdefault(path, {})[key] = buffer
        return {
            path: self._model.encoder_cudagraph_forward(values, path)
            for path, values in paths.items()
        }

    def split(
        self, output: Any, inputs: Inputs, indices: Sequence[int], items: Sequence[Item]
    ) -> list[torch.Tensor]:
        tokens = [
            spec.output_tokens for spec in self._model.get_encoder_cudagraph_item_specs(inputs)
        ]
        found: dict[int, torch.Tensor] = {}
        self._model.postprocess_encoder_output(
            output,
            list(indices),
            tokens,
            found,
            clone=False,
            batch_mm_kwargs=self._select(inputs, indices),
        )
        return [found[index] for index in indices]

    def eager(self, inputs: Inputs, indices: Sequence[int]) -> list[torch.Tensor]:
        chosen = self._select(inputs, indices)
        output = {
            path: self._model.encoder_eager_forward(chosen, path) for path in self._used(chosen)
        }
        return self.split(output, inputs, indices, [])

    def _select(self, inputs: Inputs, indices: Sequence[int]) -> dict[str, Any]:
        chosen: dict[str, Any] = self._model.select_encoder_cudagraph_items(inputs, list(indices))
        return chosen

    def _used(self, inputs: Inputs) -> list[str]:
        specs = self._model.get_encoder_cudagraph_item_specs(inputs)
        return [
            path for path in self._paths if any(spec.get_path_output_tokens(path) for spec in specs)
        ]

    def _tokens(self, spec: Any) -> tuple[int, ...]:
        return (spec.output_tokens, *(spec.get_path_output_tokens(path) for path in self._paths))
