"""Where the host waits for the device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WAITS = "called a synchronizing CUDA operation"
"""What torch says of an operation that waits."""


@contextmanager
def refused_synchronisations() -> Iterator[None]:
    """Let torch raise where the host waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def synchronisations() -> Iterator[list[str]]:
    """Collect the places that wait for the device, as ``file:line``, once for each time.

    The list is full when the context ends. Torch sees its own operations that wait, such as
    ``item()``, but no events that somebody waits for.
    """
    found: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
            found += [f"{w.filename}:{w.lineno}" for w in caught if _WAITS in str(w.message)]
