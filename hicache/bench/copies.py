"""GB/s of our copies between pinned host memory and the device, beside plain memcpy."""

from __future__ import annotations

from typing import Any


def measure(device: str, tiny: bool) -> list[dict[str, Any]]:
    """Rows of memcpy and of our engine."""
    return []
