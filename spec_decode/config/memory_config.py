"""What stands under ``graft.tree.memory``."""

from __future__ import annotations

from typing import Literal

from pydantic import ByteSize, Field

from vllm_graft.base.options import Bytes, Section


class MemoryConfig(Section):
    """Texts of finished and running requests, in which those of others are looked for."""

    bytes: Bytes = Field(default=ByteSize(64 << 20), gt=0)
    """Memory of each rank's device. A token takes 36.6 bytes; the oldest texts make room for new
    ones."""

    scope: Literal["tenant", "server"] = "tenant"
    """Requests that draft from each other's texts. ``tenant``: those with the same ``cache_salt``
    and LoRA adapter; those without either share, as in vLLM's prefix cache. ``server``: all."""

    corpora: tuple[str, ...] = ()
    """Files of texts that the server knows from its start on, as `corpora_bytes` has room for them:
    ``.jsonl`` with a text per line (a string, or an object with ``text``), else one text in UTF-8.
    Requests without a ``cache_salt`` and an adapter find what is in them, with scope ``server``
    all."""

    corpora_bytes: Bytes = Field(default=ByteSize(0), ge=0)
    """Memory of each rank's device for corpora, beside ``bytes``; 0 for none. A token takes 36.6
    bytes. A corpus stays until it is dropped."""

    prompts: bool = False
    """Whether the last 1,024 tokens of each prompt are kept too, 64 of them in a step. False:
    answers, each with the last 8 tokens before it."""


def memory_section(value: object) -> object:
    """``true`` for all defaults, ``false`` and the scope ``request`` for none; also as the words of
    a command."""
    keys = MemoryConfig.model_fields.keys()
    if isinstance(value, dict) and value.get("scope") == "request" and value.keys() <= keys:
        return None
    word = value.lower() if isinstance(value, str) else value
    if word is True or word == "true":
        return MemoryConfig()
    if word is False or word == "false":
        return None
    if value is None or isinstance(value, (dict, MemoryConfig)):
        return value
    raise ValueError("say true, false, or a mapping such as {'bytes': '64MiB'}")
