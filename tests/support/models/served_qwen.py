"""Tiny Qwen3.5 models as they are served: with a vision tower and M-RoPE, or their text alone."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from tests.support.models.recurrent_models import save_with_module, text_sizes
from tests.support.vision.vision_models import VOCAB_SIZE, noise_image, write_qwen3_vl

if TYPE_CHECKING:
    import torch

    from vllm_graft.spec_decode.verification.context import VerifyStep

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
IMAGE_SIDE = 32
"""Pixels on a side of what is one token of an image."""

_ADDED = 0.25
"""Scale of what a layer adds to the residual stream. With it the next token is often, but not
always, what the last token's embedding alone says, and that is what the module reads."""

_SHARP = 1.0
"""Weight of the norms of queries and keys, to which the model adds 1. With it attention depends on
positions so much that wrong ones change answers."""

_OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")
"""Ends of the names of weights that write to the residual stream."""

_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")

_ROPE: dict[str, Any] = {
    "rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5],
    "mrope_interleaved": True,
}  # fmt: skip
"""Pairs of a head's dimensions that turn by an image's frame, row and column."""


def write_served_qwen3_5(folder: Path, *, experts: bool = False, **sizes: Any) -> Path:
    """Write a random Qwen3.5 with three layers of a vision tower."""
    # Its tokenizer, processor and tower are those of Qwen3-VL.
    other = json.loads((write_qwen3_vl(folder) / "config.json").read_text())
    text = _text(experts, **sizes)
    vision = other["vision_config"] | {
        "model_type": "qwen3_5_vision", "out_hidden_size": text["hidden_size"],
        "deepstack_visual_indexes": [], "initializer_range": 0.2,
    }  # fmt: skip
    ids = {name: other[name] for name in _IDS}
    name = "Qwen3_5MoeForConditionalGeneration" if experts else "Qwen3_5ForConditionalGeneration"
    return _write(folder, name, {"text_config": text, "vision_config": vision, **ids})


def write_text_qwen3_5(folder: Path, *, experts: bool = False, **sizes: Any) -> Path:
    """Write the text model alone; arguments and result are those of `write_served_qwen3_5`."""
    name = "Qwen3_5MoeForCausalLM" if experts else "Qwen3_5ForCausalLM"
    return _write(folder, name, _text(experts, **sizes))


def _write(folder: Path, name: str, values: dict[str, Any]) -> Path:
    import torch
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, name)
    made = model(model.config_class(**values))
    return save_with_module(folder, made, "mtp_num_hidden_layers", edit=_draft_well)


def _text(experts: bool, **sizes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"vocab_size": VOCAB_SIZE}
    if experts:
        values |= {
            "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
            "num_experts": 4, "num_experts_per_tok": 2,
        }  # fmt: skip
    text = text_sizes(**values | sizes)
    turning = 2 * sum(_ROPE["mrope_section"]) / text["head_dim"]
    return text | {"rope_parameters": _ROPE | {"partial_rotary_factor": turning}}


def _draft_well(weights: dict[str, torch.Tensor]) -> None:
    """Let the module predict what the target would say if its layers added nothing."""
    import torch

    hidden = weights["mtp.norm.weight"].numel()
    weights["mtp.fc.weight"] = torch.eye(hidden, 2 * hidden)
    for name, weight in weights.items():
        if name.endswith(_OUTPUTS) and ".visual." not in name:
            weight.mul_(_ADDED)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            weight.fill_(_SHARP)
        elif name.endswith("embed_tokens.weight"):
            # As long as the module's norm makes them.
            weight.normal_()


@contextlib.contextmanager
def rows_at_their_slots() -> Iterator[None]:
    """Give a node the M-RoPE positions of its slot in place of its depth: a negative control."""
    from vllm_graft.spec_decode.verification.context import TreeContext

    stock = TreeContext.begin

    def begin(self: TreeContext, *args: Any, **kwargs: Any) -> VerifyStep:
        step = stock(self, *args, **kwargs)
        assert step.depth_shift is not None
        step.depth_shift.zero_()
        return step

    with mock.patch.object(TreeContext, "begin", begin):
        yield


def image_request(text: str, sizes: Sequence[tuple[int, int]], seed: int = 0) -> dict[str, Any]:
    """A request with images of random pixels before a text."""
    images = [noise_image(*size, seed=seed + index) for index, size in enumerate(sizes)]
    return {"prompt": IMAGE * len(images) + text, "multi_modal_data": {"image": images}}
