"""Bytes that a step has to read once, and how fast the device copies: what a step could take."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

COPY_BYTES = 1 << 30

PASSES, REPLAYS = 15, 8
"""Medians are over so many passes of so many replays each: a replay's launch hides behind the one
before, as it does in a step."""


@dataclass(frozen=True)
class StepBytes:
    """What a step of an engine reads at least, in bytes.

    `target` and `draft` are weights with the output head, but without the embedding, of which a
    step reads some rows. `token` is the K/V of one in all layers. `copy_rate` is of a large copy,
    bytes read and written per second; 0 where there is no GPU, and where the target has experts,
    of which a step reads nobody knows how many.
    """

    target: int
    draft: int
    token: float
    copy_rate: float

    def use(self, step: float, held: float) -> float | None:
        """Share of the bandwidth that a step of so many seconds uses; None without a copy's rate.

        It is the time in which all that must be read, the K/V of `held` tokens too, could be
        copied, over the step's.
        """
        if not self.copy_rate or not step:
            return None
        return (self.target + self.draft + held * self.token) / self.copy_rate / step


def step_cell(step_ms: float, tokens: float, use: float | None) -> str:
    """Show a step in a table: its time, tokens per read of the target's weights, bandwidth used."""
    return f"{step_ms:.2f} ms, {tokens:.1f}, {'-' if use is None else format(use, '.0%')}"


def step_bytes(worker: Any) -> StepBytes:
    """Measure an engine's `StepBytes` in its worker, while no request is in flight."""
    runner = worker.model_runner
    draft = getattr(getattr(runner, "speculator", None), "model", None)
    fp8_head = getattr(getattr(runner.speculator, "head", None), "fp8", None) if draft else None
    groups = runner.kv_cache_config.kv_cache_groups
    specs = [(len(group.layer_names), group.kv_cache_spec) for group in groups]
    token = sum(layers * spec.page_size_bytes / spec.block_size for layers, spec in specs)
    known = runner.device.type == "cuda" and not has_experts(runner.model)
    rate = copy_bandwidth(runner.device) if known else 0.0
    read = 0 if draft is None else draft_bytes(draft, fp8_head)
    return StepBytes(target_bytes(runner.model), read, token, rate)


def has_experts(target: Any) -> bool:
    """Whether rows of a step read different weights, those of their experts."""
    return any("experts" in name.split(".") for name, _ in target.named_parameters())


def target_bytes(target: Any) -> int:
    """Sum up the target's weights in bytes; an embedding counts where it is the output head too."""
    head = getattr(target, "lm_head", None)
    tied = getattr(head, "weight", None)
    return int(
        sum(
            weight.numel() * weight.element_size()
            for name, weight in target.named_parameters()
            if "embed_tokens" not in name.split(".") or weight is tied
        )
    )


def draft_bytes(draft: Any, fp8_head: Any = None) -> int:
    """Sum up the weights that a pass over a level reads, in bytes, with the output head.

    The embedding is left out, because a pass reads only a few of its rows, and so is `fc`, which
    combines the target's states in the extend pass alone. An output head in FP8 counts instead of
    the draft's own.
    """
    unread = {"embed_tokens", "fc"} | ({"lm_head"} if fp8_head else set())
    own = sum(
        weight.numel() * weight.element_size()
        for name, weight in draft.named_parameters()
        if weight.is_floating_point() and not unread & set(name.split("."))
    )
    return int(own + (fp8_head.num_bytes if fp8_head else 0))


def copy_bandwidth(device: torch.device) -> float:
    """Measure bytes per second, read and written, of a large copy within the device."""
    import torch

    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = median_seconds(functools.partial(target.copy_, source), device)
    del source, target
    torch.cuda.empty_cache()
    return 2 * COPY_BYTES / seconds


def median_seconds(launch: Callable[[], object], device: torch.device) -> float:
    """Time a launch, in seconds: the median of several passes."""
    return statistics.median(replay_seconds(launch, device) for _ in range(PASSES))


def replay_seconds(launch: Callable[[], object], device: torch.device) -> float:
    """Time one replay, in seconds: several run in a row, after one that is not timed."""
    from vllm_graft.spec_decode.drafters.step_costs import time_launches

    launch()
    return time_launches([launch] * REPLAYS, device) / REPLAYS
