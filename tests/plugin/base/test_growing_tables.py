"""Tables that may grow in a serving engine, each with why no request makes it large."""

from pathlib import Path

import pytest

from tests.support.growing_tables import growing, growing_in

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("plugin", "spec_decode", "graph_runners", "hicache")
LINKS = ("plugin/spec_decode", "plugin/graph_runners", "plugin/hicache")
# Commands and tests, whose process ends with its work.
COMMANDS = (
    "plugin/bench",
    "plugin/metrics/server_info.py",
    "plugin/plan",
    "plugin/proof",
    "plugin/scaffold",
    "plugin/seams/sources",
    "plugin/testing",
)

BOUNDED = {
    "An entry per class, name, metric or place of the code.": """
        plugin/base/metric.py:Counters._values plugin/base/info.py:._counted
        plugin/base/info.py:._declined plugin/base/info.py:._providers
        plugin/hooks/manager.py:Manager._configured plugin/hooks/manager.py:Manager._hooks
        plugin/hooks/manager.py:Manager._plugins plugin/hooks/manager.py:Manager.broken
        plugin/hooks/manager.py:manager plugin/metrics/board.py:Board._states
        plugin/base/metric.py:Series._children plugin/metrics/relay.py:Increments._known
        plugin/metrics/relay.py:Relay._reported
        spec_decode/refusals/fit_refusals.py:differing
        plugin/seams/compare.py:_installed
        plugin/seams/post_import.py:_Finder.callbacks plugin/seams/versions.py:differing
        plugin/seams/wrap.py:BuiltClasses._classes
        spec_decode/targets/families.py:_declared
        spec_decode/targets/dense/window.py:_keeping
        spec_decode/targets/dense/layer.py:_tree_impl spec_decode/kernels/kernel_launch.py:_kinds
        spec_decode/verification/context.py:Counters.draft_launches
        hicache/storage/guarded.py:Guarded._told
        graph_runners/vision/graphs/vision_metrics.py:VitStats.captures
        graph_runners/vision/graphs/vision_metrics.py:VitStats.declines
        graph_runners/vision/graphs/vision_metrics.py:VitStats.dropped
        graph_runners/vision/graphs/vision_metrics.py:VitStats.items
        graph_runners/vision/graphs/vision_metrics.py:VitStats.replays
        graph_runners/vision/capture/graph_backend.py:stream_of
        hicache/rank/worker.py:HiCacheWorker._counters
        spec_decode/verification/accepted_kv.py:LayerSaves._seen""",
    "Per place of the code at most 16 messages of at most 4,096 characters.": """
        plugin/base/log.py:Once._said""",
    "Filled at the start, from the model's layers and the configuration.": """
        hicache/host/region.py:remove_at_exit
        spec_decode/heads/head_weights.py:HeadWeights._parameters
        plugin/seams/permission.py:Seen.flags plugin/seams/permission.py:Seen.rows
        spec_decode/targets/dense/two_pass.py:KernelChoice.costs
        spec_decode/targets/dense/two_pass.py:KernelChoice.used
        spec_decode/drafters/levels.py:LevelGrowth.block_tables
        spec_decode/drafters/standalone/draft_model.py:DraftModelTrees.first_inputs
        spec_decode/drafters/draft_trees.py:DraftTrees.narrow_plans
        spec_decode/drafters/draft_trees.py:DraftTrees.plans
        spec_decode/startup/ahead.py:Ahead.failed spec_decode/startup/rehearsal.py:_Stage.drafts
        spec_decode/targets/recurrent/recurrent_family.py:RecurrentFamily._checked
        spec_decode/verification/context.py:TreeContext._made
        hicache/copies/streams.py:StreamCopyEngine._layer_events
        hicache/copies/strided.py:StridedPlanner.columns
        hicache/pages/namespace.py:Engine.layout hicache/pages/namespace.py:Engine.options""",
    "An entry per number of requests, nodes or rows, which the configuration bounds.": """
        spec_decode/targets/latent/latent_attention.py:latent_tile
        spec_decode/targets/latent/own_latents.py:own_tile
        spec_decode/kernels/attention/attention_plan.py:choose_plan
        spec_decode/kernels/attention/attention_plan.py:Tile.choose
        spec_decode/counts/tree_metrics.py:TreeWatch._by_depth
        spec_decode/counts/tree_metrics.py:TreeWatch._nodes
        spec_decode/tuning/acceptance.py:_DeepPaths._paths
        spec_decode/tuning/copied_texts.py:CopiedTexts._texts
        plugin/learn/yields.py:Yields.by_nodes
        spec_decode/heads/head_weights.py:HeadWeights._read
        spec_decode/tuning/step_times.py:StepTimes._kept
        spec_decode/tuning/step_times.py:StepTimes._seen
        spec_decode/tuning/step_times.py:StepTimes._measured
        spec_decode/verification/context.py:TreeContext.plain_sizes
        spec_decode/tuning/step_times.py:StepTimes.costs
        spec_decode/tuning/trials.py:Trials._accounts spec_decode/tuning/trials.py:_Account.tried
        spec_decode/tuning/tuner.py:_BatchHistory.ratios
        spec_decode/tuning/trials.py:_Account.wrong spec_decode/tuning/tuner.py:NodeTuner._batches
        spec_decode/tuning/tuner.py:NodeTuner._lengths
        spec_decode/tuning/tuner.py:NodeTuner._fitting
        graph_runners/language/draft.py:VerifyingDraftRunner._equal""",
    "A local object of one request, which the budget of work bounds.": """
        spec_decode/lookup/schema_text.py:_Pieces.found
        spec_decode/trees/text_state.py:Reference.tokens
        spec_decode/lookup/schema_text.py:_Reader._found""",
    "Each has one of the segments that the configuration gives; no request adds one.": """
        spec_decode/lookup/corpora.py:Corpora.known""",
    "Graphs and buffers within the memory that the configuration gives.": """
        graph_runners/vision/capture/device_memory.py:Arena._buffers
        graph_runners/vision/capture/device_memory.py:ByteBudget.owners
        graph_runners/vision/graphs/graph.py:PaddedGraph._offsets
        graph_runners/vision/graphs/graph.py:TowerGraph.buffers
        graph_runners/vision/graphs/graph_store.py:GraphStore.buckets
        graph_runners/vision/graphs/graph_store.py:GraphStore.exact
        graph_runners/vision/graphs/padding_metadata.py:MetadataCache._kept
        graph_runners/vision/graphs/padding_metadata.py:MetadataCache._ranges""",
    "Counts of sizes of images, which are halved and dropped as they age.": """
        graph_runners/vision/capture/admission.py:Admission._counts""",
    "Sizes of images that a capture or a measurement was tried for, at a limited rate.": """
        graph_runners/vision/capture/admission.py:Admission._for_now
        graph_runners/vision/capture/admission.py:Admission.refused
        graph_runners/vision/graphs/graph_store.py:GraphStore._needs""",
    "An entry per engine that shares the host's memory, of which there are 32 at most.": """
        hicache/host/shared_slots.py:SharedSlots._dead""",
    "An entry per engine and scheduler of the process, which goes with it.": """
        hicache/pages/engine_core.py:._listeners hicache/pages/engine_core.py:._unreset""",
    "An entry per request, job or step under way, which goes with it.": """
        hicache/copies/copy_engine.py:MemoryCopyEngine._step_seconds
        hicache/host/controller.py:HybridCacheController._source_jobs
        hicache/host/controller.py:HybridCacheController.jobs
        hicache/messages/step_metadata.py:HiCacheReport.done
        hicache/messages/step_metadata.py:HiCacheReport.failed
        hicache/messages/step_metadata.py:HiCacheReport.steps
        hicache/messages/step_metadata.py:HiCacheReport.unfit
        hicache/planning/load_planner.py:LoadPlanner._queued
        hicache/planning/request_state.py:RequestState.keys
        hicache/planning/request_state.py:RequestState.sources
        hicache/planning/request_state.py:RequestState.stored
        hicache/planning/scheduler.py:HiCacheScheduler._states
        hicache/planning/cost.py:StepClock._tokens
        hicache/planning/storage_reads.py:StorageReads._running
        hicache/rank/worker.py:HiCacheWorker._async_loads
        hicache/rank/worker.py:HiCacheWorker._invalid_blocks
        hicache/storage/tier/prefetcher.py:Prefetcher._loads
        spec_decode/verification/accepted_kv.py:AcceptedTokens._ends""",
    "An entry per slot or page of host memory, or as many again.": """
        hicache/host/free_slots.py:FreeSlots._ends hicache/host/free_slots.py:FreeSlots._firsts
        hicache/host/index.py:HostIndex._pages hicache/host/eviction.py:ArcPolicy._gone_often
        hicache/host/eviction.py:ArcPolicy._gone_once
        hicache/host/eviction.py:ArcPolicy._often hicache/host/eviction.py:ArcPolicy._once
        hicache/host/eviction.py:LruPolicy._order
        hicache/planning/store_planner.py:TouchCounter._counts
        hicache/host/shared_index.py:SharedIndex._key_of
        hicache/host/shared_index.py:SharedIndex._offered
        hicache/host/shared_index.py:SharedIndex._ours
        hicache/host/shared_index.py:SharedIndex._read
        hicache/host/shared_index.py:SharedIndex._slot_of""",
    "An entry per page, file or neighbour of the storage, within its max_bytes.": """
        hicache/storage/segments/directory.py:Directory._seen
        hicache/storage/segments/recovery.py:Recovered.entries
        hicache/storage/segments/segment.py:Segment.keys
        hicache/storage/segments/space.py:Space.dirty hicache/storage/segments/space.py:Space.index
        hicache/storage/segments/space.py:Space.sealed""",
}
"""Why each of them stays small, by the reason."""


def known() -> set[str]:
    return {each for names in BOUNDED.values() for each in names.split()}


def test_each_table_and_cache_is_known_to_stay_small() -> None:
    """A new one is added to `BOUNDED`, below the reason why no request can make it large."""
    found = growing_in(ROOT, FOLDERS, (*LINKS, *COMMANDS))
    assert found - known() == set()
    assert known() - found == set()


def test_each_stands_below_one_reason() -> None:
    names = [each for names in BOUNDED.values() for each in names.split()]
    assert len(names) == len(set(names)) > 100


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("@functools.cache\ndef f(x): ...", {"f"}),
        ("class A:\n  @lru_cache(maxsize=None)\n  def f(self): ...", {"A.f"}),
        ("class A:\n  def __init__(self):\n    self.x: dict[str, int] = {}", {"A.x"}),
        ("class A:\n  def f(self):\n    self.x, self.y = set(), 3", {"A.x"}),
        ("class A:\n  x: dict[int, int] = field(default_factory=dict)", {"A.x"}),
        ("class A:\n  def f(self):\n    self.g = functools.lru_cache(9)(g)", {"A.cache()"}),
        ("x = OrderedDict()\ny = defaultdict(list)", {".x", ".y"}),
        # What is local, or full from the beginning, is none.
        ("def f():\n  x = {}", set()),
        ("x = {1: 2}\ny = dict(x)\nz = shape.cache()", set()),
    ],
)
def test_what_is_found(source: str, found: set[str]) -> None:
    assert growing(source) == found
