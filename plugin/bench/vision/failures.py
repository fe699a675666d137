"""Inputs and settings with which vLLM 0.32.0's encoder graphs go wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_graft.bench.vision.arms import Arm, Machine, make
from vllm_graft.bench.vision.image_cases import Batch, image
from vllm_graft.bench.vision.matrix import relative_error
from vllm_graft.bench.vision.random_towers import Limits, Pixels
from vllm_graft.bench.vision.stream import clear


@dataclass(frozen=True)
class Failure:
    """One case.

    Attributes:
        name: name in the report.
        batch: the batch to encode.
        limits: settings of the engine's configuration.
        embeds: whether embeddings that were made elsewhere are given, not pixels.
    """

    name: str
    batch: Batch
    limits: Limits
    embeds: bool = False


@dataclass(frozen=True)
class FailureRow:
    """One arm's answer to one case.

    Attributes:
        tower: name of the tower.
        case: name of the case.
        arm: name of the arm.
        error: largest relative error over the calls; None where a call raised.
        raised: the exception of a call that raised.
        graphed: how many of ``calls`` the manager answered.
        calls: how many there were.
    """

    tower: str
    case: str
    arm: str
    error: float | None
    raised: str
    graphed: int
    calls: int

    def cells(self) -> list[str]:
        """Return the row of the report."""
        outcome = self.raised[:90] if self.error is None else f"{self.error:.1e}"
        return [self.tower, self.case, self.arm, outcome, f"{self.graphed} of {self.calls}"]


HEADER = ("tower", "case", "arm", "relative error, or what it raised", "answered by graphs")


def cases(patch: int, limits: Limits) -> list[Failure]:
    """Return the cases for a tower.

    Images with the setting of vLLM's documentation (8 items, 64 frames) make a negative segment in
    ``cu_seqlens`` of Qwen3-VL. A video of 80 frames is more than the buffers were made for.
    Embeddings that come with the request have no pixels.
    """
    small = replace(limits, max_num_batched_tokens=min(2048, limits.max_num_batched_tokens))
    documented = replace(small, items=8, frames=64)
    size, side = (448, 8) if limits.max_num_batched_tokens >= 2048 else (112, 2)
    one = Batch("image", (image(size, size, patch),))
    video = Batch("video", ((80, side, side),))
    return [
        Failure("image, 8 items / 64 frames", one, documented),
        Failure("video of 80 frames", video, small),
        Failure("image_embeds", one, small, embeds=True),
    ]


def inputs_of(failure: Failure, model: Any, pixels: Pixels) -> Mapping[str, Any]:
    """Make the keyword arguments of ``embed_multimodal``."""
    import torch

    values = pixels.of(failure.batch)
    if not failure.embeds:
        return values
    tokens = failure.batch.patches // model.visual.spatial_merge_size**2
    like = values["pixel_values"]
    shape = (tokens, model.visual.out_hidden_size)
    embeds = torch.ones(shape, dtype=like.dtype, device=like.device)
    return {"image_embeds": embeds, "image_grid_thw": values["image_grid_thw"]}


def try_case(
    tower: str,
    failure: Failure,
    kind: str,
    model: Any,
    machine: Machine,
    pixels: Pixels,
    calls: int = 4,
) -> FailureRow:
    """Make the arm with the case's settings, and call it until its graphs have answered."""
    inputs = inputs_of(failure, model, pixels)
    expected = Arm("eager", model, machine).finished(inputs)
    graphed, worst, done = 0, 0.0, 0
    arm = None
    try:
        arm = make(kind, model, machine, failure.limits)
        for done in range(1, calls + 1):
            found = arm.finished(inputs)
            worst = max(worst, relative_error(found, expected))
            graphed = done - arm.eager_calls
            if done == 1:
                arm.prewarm(inputs)
    except Exception as raised:
        text = f"{type(raised).__name__}: {str(raised).splitlines()[0] if str(raised) else ''}"
        return FailureRow(tower, failure.name, kind, None, text, graphed, max(1, done))
    finally:
        if arm is not None:
            clear(arm)
    return FailureRow(tower, failure.name, kind, worst, "", graphed, calls)
