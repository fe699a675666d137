"""Ranks of a training run that several GPUs share, as `torchrun` starts them."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def begin() -> int:
    """Join the other processes that `torchrun` started, if it did; return this one's rank."""
    if "RANK" not in os.environ:
        return 0
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_rank())
    dist.init_process_group("nccl" if cuda else "gloo")
    rank: int = dist.get_rank()
    return rank


def end() -> None:
    """Leave the other processes, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def local_rank() -> int:
    """The number of this process's GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))
