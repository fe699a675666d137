"""The engine module of the installed vLLM: one per minor version, which differ by behaviour.

Nothing else asks for vLLM's version. A minor that is newer than all that we know takes the newest
module: its seams have been compared with the ledger before anything here is used.
"""

from __future__ import annotations

import functools

from vllm_graft.base.errors import SeamError
from vllm_graft.seams.compare import vllm_version
from vllm_graft.seams.ledger.minor import minor_of
from vllm_graft.seams.v0_32 import V032

Engine = V032
"""What an engine module offers; newer ones are subclasses that override what has changed."""

ENGINES: tuple[type[Engine], ...] = (V032,)
"""Oldest first."""


@functools.cache
def engine() -> Engine:
    """The module for the installed vLLM.

    Raises:
        SeamError: if the installed vLLM is older than all that we know.
    """
    return engine_for(vllm_version())


def engine_for(version: str) -> Engine:
    """The module for a version: the newest that is not newer than it.

    Raises:
        SeamError: if there is none.
    """
    asked = minor_of(version)
    fitting = [known for known in ENGINES if minor_of(known.minor) <= asked]
    if not fitting:
        known = ", ".join(each.minor for each in ENGINES)
        raise SeamError(
            f"vLLM {version} is older than what vllm-graft knows ({known}): install one"
        )
    return fitting[-1]()
