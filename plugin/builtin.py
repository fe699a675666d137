"""Our own parts, registered through the same hooks as a third party's."""

from __future__ import annotations

from vllm_graft import hookimpl
from vllm_graft.entries import (
    DraftGraphRunner,
    EvictionPolicy,
    KVConnector,
    Proposer,
    StorageBackend,
    TreePolicy,
)


@hookimpl(trylast=True)
def graft_proposers() -> list[Proposer]:
    """The tree of EAGLE-2."""
    load = "vllm_graft.spec_decode.proposer:TreeEagleSpeculator"
    return [Proposer("tree", load, "drafts a tree with an EAGLE head, verified in one pass")]


@hookimpl(trylast=True)
def graft_tree_policies() -> list[TreePolicy]:
    """The shape that the configuration asks for."""
    load = "vllm_graft.spec_decode.policy:dynamic"
    return [TreePolicy("dynamic", load, "the configured topk and steps, best nodes kept")]


@hookimpl(trylast=True)
def graft_draft_graph_runners() -> list[DraftGraphRunner]:
    """One graph for all levels of the tree, and none at all."""
    module = "vllm_graft.graph_runners.draft"
    return [
        DraftGraphRunner(
            "cuda_graph", f"{module}:DraftGraphRunner", "all levels as one CUDA graph a batch size"
        ),
        DraftGraphRunner(
            "eager", f"{module}:EagerDraftRunner", "launches each draft step, no CUDA graph"
        ),
    ]


@hookimpl(trylast=True)
def graft_kv_connectors() -> list[KVConnector]:
    """The host KV cache."""
    load = "vllm_graft.hicache.connector:HiCacheConnector"
    return [KVConnector("HiCacheConnector", load, "KV below GPU memory: host memory, storage")]


@hookimpl(trylast=True)
def graft_storage_backends() -> list[StorageBackend]:
    """Stores of the host KV cache below host memory."""
    return [
        StorageBackend(
            "segments",
            "vllm_graft.hicache.segments.backend:SegmentsBackend",
            "append-only segments of checked records, bounded, recovered after a crash",
        ),
        StorageBackend(
            "file",
            "vllm_graft.hicache.file_backend:FileBackend",
            "one checked file a page; simple, shareable by processes, for small caches",
        ),
        StorageBackend(
            "vllm_tier",
            "vllm_graft.hicache.tier_backend:VllmTierBackend",
            "a secondary tier of vLLM's (fs, obj, ...), its pages checked; without a byte cap",
        ),
    ]


@hookimpl(trylast=True)
def graft_eviction_policies() -> list[EvictionPolicy]:
    """Eviction policies of the host pool."""
    package = "vllm_graft.hicache.policies"
    return [
        EvictionPolicy("lru", f"{package}.lru:LruPolicy", "least recently used"),
        EvictionPolicy("lfu", f"{package}.lfu:LfuPolicy", "least frequently used, with ageing"),
        EvictionPolicy("arc", f"{package}.arc:ArcPolicy", "adaptive: recency against frequency"),
        EvictionPolicy(
            "cost_aware",
            f"{package}.cost_aware:CostAwarePolicy",
            "fewest recompute seconds saved a byte, with ageing",
        ),
    ]
