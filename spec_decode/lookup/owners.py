"""Tells whose texts are whose in a memory: a number for each scope, and for each prompt in it."""

from __future__ import annotations

import hashlib
import os
from array import array
from typing import TYPE_CHECKING

from vllm_graft.spec_decode.trees.reference import Owner

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Owners:
    """Numbers the owners of texts by a hash, whose key is this process's own and is kept nowhere.

    The engine core asks for them where it takes requests in, so that all ranks get the same ones
    and no step hashes a prompt.

    Args:
        scope: ``tenant`` for requests of one ``cache_salt`` and adapter, ``server`` for all.
    """

    def __init__(self, scope: str) -> None:
        self._by_tenant, self._key = scope == "tenant", os.urandom(16)

    def of(self, request: Request) -> Owner:
        adapter = request.lora_request
        scope = self._name(request.cache_salt, None if adapter is None else adapter.lora_name)
        prompt = array("q", request.prompt_token_ids or ()).tobytes()
        return Owner(self._number(scope), self._number(scope + b"\0" + prompt))

    def scope(self, salt: str | None, adapter: str | None) -> int:
        """The scope of requests with this ``cache_salt`` and adapter."""
        return self._number(self._name(salt, adapter))

    def _name(self, salt: str | None, adapter: str | None) -> bytes:
        tenant = (salt, adapter) if self._by_tenant else "server"
        return repr(tenant).encode("utf-8", "surrogatepass")

    def _number(self, text: bytes) -> int:
        found = hashlib.blake2b(text, digest_size=8, key=self._key).digest()
        # The first bit would be a sign, and 0 is nobody's.
        return int.from_bytes(found) >> 1 or 1
