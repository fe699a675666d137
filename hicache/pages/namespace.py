"""The namespace: 16 bytes that differ whenever the same page bytes could mean something else.

A block's hash covers its tokens. The namespace covers everything else, which
:mod:`vllm_graft.hicache.pages.inputs` lists. KV is shared only within a namespace.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from vllm_graft.base.log import logger
from vllm_graft.hicache.pages.inputs import INPUTS, Engine
from vllm_graft.hicache.pages.page_key import NAMESPACE_BYTES

NAMESPACE_START = NAMESPACE_BYTES // 2
"""Length of a namespace's first half, which is known before the model is loaded."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def namespace(engine: Engine) -> bytes:
    """The namespace of an engine's pages.

    It reads the checkpoint, so call it once per engine. The first half is that of
    :func:`namespace_start`; the second half covers everything.

    Args:
        engine: what the inputs are read from, with a loaded model.

    Raises:
        ConfigError: if the weights are not on a local disk, and the user gave no identity.
    """
    parts = inputs(engine)
    early = {row.name: parts[row.name] for row in INPUTS if row.early}
    found = digest(early)[:NAMESPACE_START] + digest(parts)[NAMESPACE_START:]
    logger.info("KV namespace %s.", found.hex())
    logger.debug("KV namespace %s is %s", found.hex(), parts)
    return found


def namespace_start(engine: Engine) -> bytes:
    """The first :data:`NAMESPACE_START` bytes of a namespace; the model need not be loaded.

    Engines share them if they differ only in what is known of a loaded model. Errors are those of
    :func:`namespace`.
    """
    late = [row.name for row in INPUTS if not row.early]
    return digest(inputs(engine, without=late))[:NAMESPACE_START]


def inputs(engine: Engine, without: Collection[str] = ()) -> dict[str, Any]:
    """The values of all inputs of K/V but some, by name."""
    return {row.name: row.read(engine) for row in INPUTS if row.name not in without}


def digest(parts: Mapping[str, Any]) -> bytes:
    """16 bytes (BLAKE2b) of a nested mapping. The order of its keys does not count."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.blake2b(text.encode(), digest_size=NAMESPACE_BYTES).digest()


def _plain(value: Any) -> str:
    """A value that JSON does not know, as text without memory addresses."""
    return _ADDRESS.sub("", f"{type(value).__name__}:{value}")
