"""Begins to compile a drafter's kernels before its model is loaded."""

from __future__ import annotations

from typing import Protocol

import torch

from vllm_graft.base.log import warning_once
from vllm_graft.base.values import lever
from vllm_graft.spec_decode.startup.ahead import Ahead, compile_ahead
from vllm_graft.spec_decode.startup.rehearsal import Rehearsable, rehearse

COMPILE_PROCESSES = "VLLM_GRAFT_COMPILE_PROCESSES"
"""Environment variable: how many processes compile; 0 lets the worker compile at first launches."""

_HOPPER = 9
"""Compute capability with FlashAttention 3."""


class Starting(Rehearsable, Protocol):
    """A drafter whose engine is being built.

    Attributes:
        device: its device.
    """

    device: torch.device


def begin(drafter: Starting) -> Ahead:
    """Begin to compile what a drafter and its target will launch; it never raises.

    Args:
        drafter: a drafter that has not loaded its model yet.
    """
    device, processes = drafter.device, lever(COMPILE_PROCESSES)
    if device.type == "cuda":
        # What the worker compiles itself is counted in any case.
        drafter.trees.clock.listen()
    if processes == 0:
        return Ahead(why=f"{COMPILE_PROCESSES} is 0")
    if device.type != "cuda" or torch.version.hip is not None:
        return Ahead(why=f"kernels of device {device} are not compiled ahead")
    major, minor = torch.cuda.get_device_capability(device)
    with drafter.trees.clock.part("rehearsal"):
        launches, problems = rehearse(drafter, flash=major == _HOPPER)
    if problems:
        warning_once(
            "vllm-graft does not know beforehand which kernels are needed for "
            f"{'; '.join(problems)}. They are compiled where they are first used"
        )
    return compile_ahead(launches, ("cuda", 10 * major + minor, 32), processes)
