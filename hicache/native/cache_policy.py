"""Between our eviction policies and vLLM's ``CachePolicy``, both ways.

Ours in vLLM's OffloadingConnector::

    "kv_connector_extra_config": {
        "eviction_policy": "CostAware",
        "cache_policy_module_path": "vllm_graft.hicache.native.cache_policy", ...}

vLLM's, or anybody's ``CachePolicy``, in our host pool: :func:`from_cache_policy` in an entry of
``graft_eviction_policies``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus, order_request_keys
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

from vllm_graft.hicache.host.eviction import EvictionPolicy, IsProtected, Key
from vllm_graft.hicache.host.policies.arc import ArcPolicy
from vllm_graft.hicache.host.policies.cost_aware import CostAwarePolicy
from vllm_graft.hicache.host.policies.lfu import LfuPolicy
from vllm_graft.hicache.host.policies.lru import LruPolicy
from vllm_graft.hicache.pages.page_key import PageKey

EQUAL_SHARE_TOKENS = 32768
"""Prefix length at which attending to it costs a token as much as the rest of the model does.

vLLM tells a policy where a chunk ends, not what it costs. Per token a model of ``n`` parameters,
``l`` layers and width ``d`` does ``2n`` operations and ``4ld`` more for each token before it; for
8B and 70B Llamas they are equal at about 30k and 50k tokens.
"""


class _Ours(CachePolicy):
    """One of our policies, in vLLM's clothes. Chunks are all of one size."""

    kind: ClassVar[type[EvictionPolicy]]

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._costs: dict[OffloadKey, float] = {}
        self._order = self.kind(max(1, cache_capacity))

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """The chunk of ``key``, ready or not."""
        return self._chunks.get(key)

    def insert(
        self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None
    ) -> None:
        """Add a chunk, whose cost was told to :meth:`on_store_miss`.

        vLLM 0.32 gives no context.
        """
        self._chunks[key] = chunk
        self._order.insert(key, self._costs.pop(key, 1.0), 1)

    def remove(self, key: OffloadKey) -> None:
        """Forget a chunk."""
        self._chunks.pop(key, None)
        self._order.remove(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Count a use of each, the last block first; one that is being stored was not used."""
        for key in reversed(list(keys)):
            self._use(key)

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Note what each chunk would cost to compute again, for the insertion that may follow."""
        self._costs = {}
        for key in keys:
            end = req_context.get_offload_key_position(key) or 0
            self._costs[key] = 1.0 + end / EQUAL_SHARE_TOKENS

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Count a use of what the request reused; order what it stored, its end oldest."""
        for key in reversed(order_request_keys(key_groups, req_context)):
            if key in reused_keys:
                self._use(key)
            elif key in insertion_only_keys:
                self._order.refresh(key)

    def evict(
        self, n: int, protected: set[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Take ``n`` idle chunks out; None, and no change, if there are fewer."""
        keys = self._order.evict(n, lambda key: self._is_busy(key, protected))
        if keys is None:
            return None
        return [(key, self._chunks.pop(key)) for key in keys]

    def clear(self) -> None:
        """Forget everything."""
        self._chunks.clear()
        self._costs.clear()
        self._order.clear()

    def _use(self, key: OffloadKey) -> None:
        chunk = self._chunks.get(key)
        if chunk is not None and not chunk.is_ready:
            self._order.refresh(key)
        else:
            self._order.touch(key)

    def _is_busy(self, key: Key, protected: set[OffloadKey]) -> bool:
        return self._chunks[key].ref_cnt != 0 or key in protected


class Lru(_Ours):
    """:class:`~vllm_graft.hicache.host.policies.lru.LruPolicy`."""

    kind = LruPolicy


class Lfu(_Ours):
    """:class:`~vllm_graft.hicache.host.policies.lfu.LfuPolicy`."""

    kind = LfuPolicy


class Arc(_Ours):
    """:class:`~vllm_graft.hicache.host.policies.arc.ArcPolicy`."""

    kind = ArcPolicy


class CostAware(_Ours):
    """:class:`~vllm_graft.hicache.host.policies.cost_aware.CostAwarePolicy`."""

    kind = CostAwarePolicy


class NativePolicy(EvictionPolicy):
    """A ``CachePolicy`` of vLLM's in our clothes.

    It sees keys as vLLM makes them, each page's status as idle, and no costs or sizes. It wants the
    protected keys as a set: an eviction asks about every page, about a tenth of a microsecond each.

    Args:
        capacity: pages that the pool holds.
        kind: the class, built as ``kind(cache_capacity=capacity)``.
    """

    _CONTEXT = ReqContext(req_id="vllm-graft")

    def __init__(self, capacity: int, kind: type[CachePolicy]) -> None:
        super().__init__(capacity)
        self._policy = kind(cache_capacity=capacity)
        # Since vLLM 0.33 an insertion tells whose request stores it.
        takes_context = "req_context" in inspect.signature(kind.insert).parameters
        self._more = (self._CONTEXT,) if takes_context else ()
        self._keys: dict[OffloadKey, Key] = {}

    def insert(self, key: Key, cost: float, size: int) -> None:
        """Add ``key``, or use it if it is there."""
        name = _offload_key(key)
        if name in self._keys:
            self.touch(key)
            return
        self._policy.on_store_miss([name], self._CONTEXT)
        chunk = ChunkStatus(len(self._keys))
        chunk.ref_cnt = 0
        self._keys[name] = key
        self._policy.insert(name, chunk, *self._more)
        self._policy.mark_evictable(name)

    def touch(self, key: Key) -> None:
        """Count a use of ``key``."""
        self._policy.touch([_offload_key(key)], self._CONTEXT)

    def refresh(self, key: Key) -> None:
        """Make ``key`` recent, if the policy tells storing from using."""
        name = _offload_key(key)
        if name in self._keys:
            self._policy.on_request_finished([[name]], {name}, set(), self._CONTEXT)

    def remove(self, key: Key) -> None:
        """Forget ``key``."""
        name = _offload_key(key)
        if self._keys.pop(name, None) is not None:
            self._policy.remove(name)

    def evict(self, n: int, is_protected: IsProtected) -> list[Key] | None:
        """Take ``n`` keys out, in the policy's order."""
        protected = {name for name, key in self._keys.items() if is_protected(key)}
        if len(self._keys) - len(protected) < n:
            return None
        victims = self._policy.evict(n, protected)
        return None if victims is None else [self._keys.pop(name) for name, _ in victims]

    def clear(self) -> None:
        """Forget everything."""
        self._policy.clear()
        self._keys.clear()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, PageKey | bytes) and _offload_key(key) in self._keys


def from_cache_policy(name: str, module_path: str | None = None) -> Callable[[int], EvictionPolicy]:
    """What an entry of ``graft_eviction_policies`` may resolve to, for a policy of vLLM's.

    Args:
        name: one that vLLM knows (``"lru"``, ``"arc"``), or a class in ``module_path``.
        module_path: as ``cache_policy_module_path`` of the OffloadingConnector.

    Raises:
        ValueError: if vLLM does not find it.
    """
    kind = CachePolicyFactory.get_cache_policy_cls(name, module_path)
    return lambda capacity: NativePolicy(capacity, kind)


def _offload_key(key: Key) -> OffloadKey:
    """vLLM's key of a page; bytes stay as they are."""
    if isinstance(key, PageKey):
        return make_offload_key(key.hash, key.pool)
    if isinstance(key, bytes):
        return OffloadKey(key)
    raise TypeError(f"a CachePolicy takes PageKey or bytes, not {type(key).__name__}")
