"""A training run that lasts as long as it is given, and that several GPUs may share."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

Given = TypeVar("Given")


@dataclass(frozen=True)
class Run:
    """Settings of a training run, which lasts `seconds` or `steps`, whatever ends first.

    With `reading` above 0, the target reads texts for so many seconds before, and the head learns
    from these again and again: on a CPU, the target takes most of a step.
    """

    device: torch.device
    seconds: float
    steps: int = 10**9
    tokens: int = 16384
    longest: int = 768
    passes: int = 6
    rate: float = 1e-3
    warm_up: float = 0.04
    seed: int = 0
    reading: float = 0
    rank: int = 0
    """Each rank of several learns from batches in an order of its own."""


def descend(
    model: nn.Module,
    given: Iterator[Given],
    loss: Callable[[Given], Tensor],
    run: Run,
    told: Callable[[], str] = str,
) -> list[float]:
    """Train a model; return the loss of each step.

    The rate follows the clock: it rises, and falls to nothing when `run.seconds` are over. Where
    `torch.distributed` has ranks, each learns from what it is given, and all take the mean of their
    gradients, so that their models stay equal.

    Args:
        model: trained, and left in evaluation.
        given: what it learns from, without an end.
        loss: the loss of one of these, computed under autocast on a GPU.
        run: how long, and how fast.
        told: more words for the line that every fiftieth step prints.
    """
    torch.manual_seed(run.seed)
    model.train()
    _begin_alike(model)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    # Whoever reads first does that before the clock starts.
    given = chain([next(given)], given)
    began, losses, on_gpu = time.perf_counter(), list[float](), run.device.type == "cuda"
    for number, each in enumerate(given):
        elapsed = time.perf_counter() - began
        share = _largest(max(elapsed / run.seconds, number / run.steps), run.device)
        if share >= 1:
            break
        rising = min(1.0, max(share, 1e-3) / run.warm_up)
        for group in optimizer.param_groups:
            group["lr"] = run.rate * rising * 0.5 * (1 + math.cos(math.pi * share))
        with torch.autocast(run.device.type, torch.bfloat16, enabled=on_gpu):
            found = loss(each)
        optimizer.zero_grad(set_to_none=True)
        found.backward()
        _average_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(found.item())
        if number % 50 == 0:
            print(f"{elapsed:5.0f} s, step {number}: {told()}loss {found:.3f}", flush=True)
    model.eval()
    return losses


def _begin_alike(model: nn.Module) -> None:
    """Give all ranks the first one's weights."""
    if dist.is_initialized():
        for each in model.parameters():
            dist.broadcast(each.data, 0)


def _largest(share: float, device: torch.device) -> float:
    """The largest share of all ranks, whose clocks differ, so that all end at the same step."""
    if not dist.is_initialized():
        return share
    found = torch.tensor(share, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found.item())


def _average_gradients(model: nn.Module) -> None:
    """Replace each gradient by its mean over ranks, in one message."""
    if not dist.is_initialized():
        return
    given = [each.grad for each in model.parameters() if each.grad is not None]
    flat = torch.cat([each.flatten() for each in given])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for each, mean in zip(given, flat.split([each.numel() for each in given]), strict=True):
        each.copy_(mean.view_as(each))


def begin_ranks() -> int:
    """Join the other processes that `torchrun` started, if it did; return this one's rank."""
    if "RANK" not in os.environ:
        return 0
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_rank())
    dist.init_process_group("nccl" if cuda else "gloo")
    rank: int = dist.get_rank()
    return rank


def end_ranks() -> None:
    """Leave the other processes, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def local_rank() -> int:
    """The number of this process's GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))
