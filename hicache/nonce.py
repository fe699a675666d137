"""What the processes of one engine know of each other and nobody else knows: a random text.

The host's memory is a file that several processes find by its name, so its name must be theirs
alone. The text stands in the extra config of each connector of ours: see `stamp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY = "_graft_nonce"
"""Key of the extra config. vLLM hashes no part of that: neither do we, for the namespace."""


class Nonce(str):
    """The text. Its type tells it from one that a user has written, and survives pickling."""

    __slots__ = ()


def without_nonce(extra: Mapping[str, Any]) -> dict[str, Any]:
    """What the user has written; a key of our name that the user wrote is left in."""
    return {key: value for key, value in extra.items() if not isinstance(value, Nonce)}


def nonce_of(extra: Mapping[str, Any]) -> Nonce | None:
    """The nonce of a connector; None where its configuration was not stamped."""
    found = extra.get(KEY)
    return found if isinstance(found, Nonce) else None
