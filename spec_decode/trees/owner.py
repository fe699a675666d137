"""Whose text a request's is, where texts of several requests are kept together."""

from __future__ import annotations

from typing import NamedTuple


class Owner(NamedTuple):
    """Numbers of 63 bits, 0 for nobody: such a text is not kept, and finds nothing.

    Attributes:
        scope: requests of one scope read each other's texts, and nobody else's.
        prompt: requests with the same prompt have the same one.
    """

    scope: int
    prompt: int


NOBODY = Owner(0, 0)
