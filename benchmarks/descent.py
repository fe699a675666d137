"""The loop of a training run that lasts as long as it is given, and not a number of steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

Given = TypeVar("Given")


class Pace(Protocol):
    """Settings of a training run, which lasts `seconds` or `steps`, whatever ends first."""

    @property
    def device(self) -> torch.device: ...

    @property
    def seconds(self) -> float: ...

    @property
    def steps(self) -> int: ...

    @property
    def rate(self) -> float: ...

    @property
    def warm_up(self) -> float: ...

    @property
    def seed(self) -> int: ...


def descend(
    model: nn.Module,
    given: Iterator[Given],
    loss: Callable[[Given], Tensor],
    pace: Pace,
    told: Callable[[], str] = str,
) -> list[float]:
    """Train a model; return the loss of each step.

    The rate follows the clock: it rises, and falls to nothing when `pace.seconds` are over.

    Args:
        model: trained, and left in evaluation.
        given: what it learns from, without an end.
        loss: the loss of one of these, computed under autocast on a GPU.
        pace: how long, and how fast.
        told: more words for the line that every fiftieth step prints.
    """
    torch.manual_seed(pace.seed)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    # Whoever reads first does that before the clock starts.
    given = chain([next(given)], given)
    began, losses, on_gpu = time.perf_counter(), list[float](), pace.device.type == "cuda"
    for number, each in enumerate(given):
        elapsed = time.perf_counter() - began
        share = max(elapsed / pace.seconds, number / pace.steps)
        if share >= 1:
            break
        rising = min(1.0, max(share, 1e-3) / pace.warm_up)
        for group in optimizer.param_groups:
            group["lr"] = pace.rate * rising * 0.5 * (1 + math.cos(math.pi * share))
        with torch.autocast(pace.device.type, torch.bfloat16, enabled=on_gpu):
            found = loss(each)
        optimizer.zero_grad(set_to_none=True)
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(found.item())
        if number % 50 == 0:
            print(f"{elapsed:5.0f} s, step {number}: {told()}loss {found:.3f}", flush=True)
    model.eval()
    return losses
