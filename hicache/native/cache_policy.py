"""Adapters between our eviction policies and vLLM's ``CachePolicy``, in both directions.

This uses one of our policies in vLLM's OffloadingConnector::

    "kv_connector_extra_config": {
        "eviction_policy": "CostAware",
        "cache_policy_module_path": "vllm_graft.hicache.native.cache_policy", ...}

To use a ``CachePolicy`` of vLLM or of others in our host pool, let an entry of
``graft_eviction_policies`` resolve to :func:`from_cache_policy`.
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
"""Prefix length at which a token's attention costs as much as the rest of the model.

vLLM tells a policy where a chunk ends, but not its cost. A model of ``n`` parameters, ``l`` layers
and width ``d`` needs ``2n`` operations per token, and ``4ld`` more for each token before it. Both
are equal at about 30k tokens for a Llama of 8B, and at about 50k tokens for one of 70B.
"""


class _GraftPolicy(CachePolicy):
    """One of our policies as a ``CachePolicy`` of vLLM. All chunks have the same size."""

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
        """Add a chunk, with the cost that :meth:`on_store_miss` has computed.

        vLLM 0.32 passes no context.
        """
        self._chunks[key] = chunk
        self._order.insert(key, self._costs.pop(key, 1.0), 1)

    def remove(self, key: OffloadKey) -> None:
        """Forget a chunk."""
        self._chunks.pop(key, None)
        self._order.remove(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Count a use of each chunk, the last one first, except of chunks that are being stored."""
        for key in reversed(list(keys)):
            self._use(key)

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Compute the cost of recomputing each chunk, for insertions that may follow."""
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
        """Count a use of reused chunks, and order stored ones so that the last is the oldest."""
        for key in reversed(order_request_keys(key_groups, req_context)):
            if key in reused_keys:
                self._use(key)
            elif key in insertion_only_keys:
                self._order.refresh(key)

    def evict(
        self, n: int, protected: set[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Evict ``n`` idle chunks; None, with nothing changed, if there are fewer."""
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


class Lru(_GraftPolicy):
    """:class:`~vllm_graft.hicache.host.policies.lru.LruPolicy`."""

    kind = LruPolicy


class Lfu(_GraftPolicy):
    """:class:`~vllm_graft.hicache.host.policies.lfu.LfuPolicy`."""

    kind = LfuPolicy


class Arc(_GraftPolicy):
    """:class:`~vllm_graft.hicache.host.policies.arc.ArcPolicy`."""

    kind = ArcPolicy


class CostAware(_GraftPolicy):
    """:class:`~vllm_graft.hicache.host.policies.cost_aware.CostAwarePolicy`."""

    kind = CostAwarePolicy


class NativePolicy(EvictionPolicy):
    """A ``CachePolicy`` of vLLM as one of our policies.

    The policy gets vLLM's kind of keys, the status idle for every page, and no costs or sizes. It
    needs the protected keys as a set. So an eviction checks every page, which takes about a tenth
    of a microsecond for each.

    Args:
        capacity: number of pages that the pool can hold.
        kind: class of the policy, which is built as ``kind(cache_capacity=capacity)``.
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
        """Add ``key``, or count a use of it if it is known."""
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
        """Make ``key`` recent, if the policy distinguishes stores from uses."""
        name = _offload_key(key)
        if name in self._keys:
            self._policy.on_request_finished([[name]], {name}, set(), self._CONTEXT)

    def remove(self, key: Key) -> None:
        """Forget ``key``."""
        name = _offload_key(key)
        if self._keys.pop(name, None) is not None:
            self._policy.remove(name)

    def evict(self, n: int, is_protected: IsProtected) -> list[Key] | None:
        """Evict ``n`` keys, in the policy's order."""
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
    """A factory for an entry of ``graft_eviction_policies`` that uses a policy of vLLM.

    Args:
        name: name of a policy that vLLM knows (``"lru"``, ``"arc"``), or of a class in
            ``module_path``.
        module_path: same as ``cache_policy_module_path`` of the OffloadingConnector.

    Returns:
        A function that builds the policy for a capacity.

    Raises:
        ValueError: if vLLM does not find the policy.
    """
    kind = CachePolicyFactory.get_cache_policy_cls(name, module_path)
    return lambda capacity: NativePolicy(capacity, kind)


def _offload_key(key: Key) -> OffloadKey:
    """vLLM's key for a page's key. Bytes are vLLM's keys already."""
    if isinstance(key, PageKey):
        return make_offload_key(key.hash, key.pool)
    if isinstance(key, bytes):
        return OffloadKey(key)
    raise TypeError(f"a CachePolicy takes PageKey or bytes, not {type(key).__name__}")
