"""Minor versions of vLLM, as numbers that can be compared."""

from __future__ import annotations

from vllm_graft.base.errors import SeamError

Minor = tuple[int, int]


def minor_of(version: str) -> Minor:
    """``(0, 32)`` of ``"0.32.1+cpu"``.

    Raises:
        SeamError: if the text is no version.
    """
    numbers = version.split(".")
    try:
        return int(numbers[0]), int(numbers[1])
    except (IndexError, ValueError):
        raise SeamError(f"vLLM calls itself {version!r}, which is no version") from None
