"""Finds the engine core for functions that run in a worker, without tensor parallelism."""

from __future__ import annotations

import sys
from typing import Any


def calling_core() -> Any:
    """Find the engine core among the callers; None if it is not there.

    Without tensor parallelism it runs in the worker's process. Only a benchmark may look for it.
    """
    frame: Any = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if getattr(caller, "scheduler", None) is not None:
            return caller
        frame = frame.f_back
    return None


def calling_table() -> Any:
    """Find the scheduler's table of drafts by batch size among the callers; None without one."""
    return getattr(getattr(calling_core(), "scheduler", None), "dynamic_sd_lookup", None)


def calling_tuner() -> Any:
    """Find the tuner of ``shape: auto`` among the callers; None without one."""
    return getattr(calling_table(), "tuner", None)
