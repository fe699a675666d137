"""The nonce: a random text that only the processes of one engine know.

The host memory is a file that these processes find by its name, so the name must be unique to their
engine. The nonce is in the extra config of each of our connectors; see `stamp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY = "_graft_nonce"
"""Key of the extra config. Neither vLLM's hash nor our namespace covers the extra config."""

REGION_PREFIX = "vllm_graft_region_"
"""Prefix of the name of an engine's host memory file."""


class Nonce(str):
    """A nonce. Its type, which survives pickling, tells it from a text that a user has written."""

    __slots__ = ()


def without_nonce(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The extra config without nonces. A value that a user gave the nonce's key stays."""
    return {key: value for key, value in extra.items() if not isinstance(value, Nonce)}


def nonce_of(extra: Mapping[str, Any]) -> Nonce | None:
    """The nonce in a connector's extra config; None if there is none."""
    found = extra.get(KEY)
    return found if isinstance(found, Nonce) else None
