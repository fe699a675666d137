"""Every hook, one specification each. A hook that collects returns a list of entries. Hooks are
asked once per process while the engine is built, never in a step. The entry point group
``vllm_graft`` names a module or an object with implementations; see ``docs/hooks.md``."""

from vllm_graft.base.markers import hookspec
from vllm_graft.base.options import Section
from vllm_graft.hooks import entries


@hookspec
def graft_configure(config: Section) -> None:
    """See the parsed configuration, a ``vllm_graft.GraftConfig``, before any choice.

    It is shown once in each process that parses one.

    Example::

        @hookimpl
        def graft_configure(config: GraftConfig) -> None:
            if config.tree is not None:
                print("drafting trees of", config.tree.steps, "levels")
    """


@hookspec
def graft_drafters() -> list[entries.Drafter]:  # type: ignore[empty-body]
    """Drafters of trees; ``graft.tree.drafter`` names one, or the speculative config's method does.

    Example::

        @hookimpl
        def graft_drafters() -> list[Drafter]:
            load, methods = "lucky.drafter:LuckyTrees", ("eagle", "eagle3")
            return [Drafter("lucky", load, "guesses from the prompt", methods=methods)]
    """


@hookspec
def graft_target_families() -> list[entries.TargetFamily]:  # type: ignore[empty-body]
    """Families of target models; the first that claims a layer and serves all of it is taken.

    Example::

        @hookimpl
        def graft_target_families() -> list[TargetFamily]:
            load = "ring.family:RingFamily"
            return [TargetFamily("ring", load, "ring attention", serves=("chunked attention",))]
    """


@hookspec
def graft_tree_policies() -> list[entries.TreePolicy]:  # type: ignore[empty-body]
    """Shapes of the draft tree; ``graft.tree.policy`` chooses one.

    Example::

        @hookimpl
        def graft_tree_policies() -> list[TreePolicy]:
            return [TreePolicy("wide", "wide.policy:WidePolicy", "keeps two levels only")]
    """


@hookspec
def graft_draft_graph_runners() -> list[entries.DraftGraphRunner]:  # type: ignore[empty-body]
    """Ways to run the draft loop, chosen by ``graph_runner`` of ``graft.tree`` or ``graft.draft``.

    Example::

        @hookimpl
        def graft_draft_graph_runners() -> list[DraftGraphRunner]:
            return [DraftGraphRunner("traced", "traced.runner:Traced", "prints each step")]
    """


@hookspec
def graft_vit_graph_runners() -> list[entries.VitGraphRunner]:  # type: ignore[empty-body]
    """Ways to capture and replay a vision encoder.

    Example::

        @hookimpl
        def graft_vit_graph_runners() -> list[VitGraphRunner]:
            return [VitGraphRunner("padded", "padded.vit:Padded", "one graph, padded images")]
    """


@hookspec
def graft_vision_adapters() -> list[entries.VisionAdapter]:  # type: ignore[empty-body]
    """How to split a vision model for capture; an entry is named after the architecture.

    Example::

        @hookimpl
        def graft_vision_adapters() -> list[VisionAdapter]:
            name = "MyVLForConditionalGeneration"
            return [VisionAdapter(name, "my_vl.graft:Adapter", "blocks, then the merger")]
    """


@hookspec
def graft_kv_connectors() -> list[entries.KVConnector]:  # type: ignore[empty-body]
    """KV connectors; ``--kv-transfer-config`` chooses one by its name.

    Example::

        @hookimpl
        def graft_kv_connectors() -> list[KVConnector]:
            return [KVConnector("Shelf", "shelf.connector:Shelf", "keeps pages on a shelf")]
    """


@hookspec
def graft_storage_backends() -> list[entries.StorageBackend]:  # type: ignore[empty-body]
    """Stores below host memory for the host KV cache.

    Example::

        @hookimpl
        def graft_storage_backends() -> list[StorageBackend]:
            return [StorageBackend("tape", "tape.store:Tape", "slow, large")]
    """


@hookspec
def graft_eviction_policies() -> list[entries.EvictionPolicy]:  # type: ignore[empty-body]
    """Eviction policies of the host KV cache.

    Example::

        @hookimpl
        def graft_eviction_policies() -> list[EvictionPolicy]:
            return [EvictionPolicy("fifo", "fifo.policy:Fifo", "first in, first out")]
    """


@hookspec
def graft_health_checks() -> list[entries.HealthCheck]:  # type: ignore[empty-body]
    """Checks that ``vllm-graft doctor`` runs.

    Example::

        @hookimpl
        def graft_health_checks() -> list[HealthCheck]:
            def check() -> Health:
                return Health(ok=True, detail="the shelf is dry")

            return [HealthCheck("shelf", lambda: check, "looks at the shelf")]
    """
