"""What trees and chains of draft models count for ``/metrics``."""

from collections.abc import Sequence
from typing import Any

from vllm_graft.base.log import warning_once
from vllm_graft.base.metric import Kind, Metric, Numbers, Origin, PartMetrics
from vllm_graft.spec_decode.startup.clock import KERNELS
from vllm_graft.spec_decode.startup.clock import PARTS as START_PARTS

LAUNCH_REASONS = ("uncaptured", "no_fit")
"""Why passes of a draft are launched: there are no graphs, or none fits the batch."""

BATCHES = ("trees", "mixed")
"""Every request of a step verifies a tree, or prompts run beside trees."""

REFERENCE_SOURCES = ("schema", "choice", "prediction")
"""What the reference of a request is made of."""

REFERENCE_DECLINES = ("no_tokenizer", "unreadable", "wrong_type", "error", "cut", "off")
"""Why a request has no reference though its parameters ask for one: there is no tokenizer, nothing
of its schema can be read, its prediction is neither text nor tokens, reading one of them failed,
nothing reads references; or why it has a part of it: there is no room for all."""

WINDOW = 500
"""Steps over which the yield of trees is looked at."""

LEAST_YIELD = 1.1
"""Tokens per tree below which a draft does not pay; a head for another model has about 1.0."""

_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
_ENGINE = Origin.ENGINE

# fmt: off
ROWS: tuple[Metric, ...] = (
    Metric("steps", _C, "Steps of the engine in which trees were verified.", origin=_ENGINE),
    Metric("trees", _C, "Trees that were verified: one per request and step.", origin=_ENGINE),
    Metric("nodes_verified", _C, "Nodes of these trees. The root is not counted.", origin=_ENGINE),
    Metric("nodes_accepted", _C, "Nodes of these trees whose token was accepted. Each tree yields one token more.", origin=_ENGINE),
    Metric("nodes_accepted_by_depth", _C, "Accepted nodes by their depth; the root's children have depth 1.", origin=_ENGINE, label="depth"),
    Metric("nodes_per_tree", _H, "Nodes per tree that a step verified: the chosen number with shape: auto. One observation per step.", origin=_ENGINE, buckets=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 63)),
    Metric("draft_misfit", _G, f"1 if the last {WINDOW} such steps yielded fewer than {LEAST_YIELD} tokens per tree, so that the draft may be one for another model; else 0.", origin=_ENGINE),
    Metric("candidates_drafted", _C, "Candidates that the draft scored. The best of them become a tree's nodes."),
    Metric("block_positions_drafted", _C, "Positions that block drafters predicted, of all requests. Divided by the requests that drafted, it is the mean depth of a block."),
    Metric("ngram_nodes_verified", _C, "Verified nodes that n-grams put into a tree and the draft did not (graft.tree.ngram, method ngram)."),
    Metric("ngram_nodes_accepted", _C, "How many of these nodes had a token that was accepted."),
    Metric("memory_nodes_verified", _C, "How many of the nodes of n-grams were from the memory of other requests' texts and corpora (graft.tree.memory)."),
    Metric("memory_nodes_accepted", _C, "How many of these nodes had a token that was accepted."),
    Metric("reference_tokens", _C, "Tokens of the references of new requests, in which n-grams are looked for beside the requests' texts, by source. A request that was preempted is new again.", label="source", values=REFERENCE_SOURCES),
    Metric("reference_declines", _C, "New requests whose schema or prediction was not made a reference, or not all of it (cut), by reason.", label="reason", values=REFERENCE_DECLINES),
    Metric("draft_replays", _C, "Growths of a batch's trees that ran as one CUDA graph."),
    Metric("draft_launches", _C, "Growths that were launched without a graph, by reason.", label="reason", values=LAUNCH_REASONS),
    Metric("target_replays", _C, "Passes of the target over trees that ran as one CUDA graph, by what was in the batch.", label="batch", values=BATCHES),
    Metric("target_launches", _C, "Passes of the target over trees that did not run as one graph, by what was in the batch.", label="batch", values=BATCHES),
    Metric("cut_steps", _C, "Steps with prompts beside trees in which fewer nodes were verified than drafted, so that the step fits a CUDA graph (graft.tree.fit_graphs)."),
    Metric("chunked_steps", _C, "Steps whose prompts were computed in part, so that the step fits a CUDA graph (graft.tree.fit_prompts)."),
    Metric("draft_graphs", _G, "Captured graphs of growing trees."),
    Metric("draft_graph_bytes", _G, "Device memory that the draft's graphs took when they were captured."),
    Metric("draft_window", _G, "Tokens before a tree that the draft's attention sees (graft.tree.draft_window); 0: all."),
    Metric("hot_steps", _C, "Steps whose levels drafted from learned hot tokens (graft.tree.hot_tokens)."),
    Metric("hot_coverage", _G, "Part of the recently emitted tokens that the learned hot tokens held; 0 until known, and where none are learned."),
    Metric("recurrent_input_bytes", _G, "Device memory in which recurrent layers keep the inputs of nodes until a path is accepted; 0 where each node leaves a state."),
    Metric("connector_draft_layers", _G, "Layers of the draft whose K/V a KV connector gets beside that of the target's layers; 0 without a connector."),
    Metric("start_seconds", _G, "Seconds that the worker's start took, by part: listing kernels (rehearsal), waiting for those compiled ahead (wait), compiling and loading others (compile), comparing attention (attention), capturing the draft's graphs (draft_graphs), timing steps (costs).", label="part", values=START_PARTS),
    Metric("start_kernels", _G, "Kernels of trees by what came of them: compiled while the model loaded (ahead), not compilable then (failed_ahead), compiled where first launched (compiled), found in Triton's cache there (loaded).", label="how", values=KERNELS),
)
# fmt: on


class TreeWatch:
    """Counts trees in the engine core, from vLLM's ``SpecDecodingStats`` of each step. vLLM counts
    drafts by their place in the row of tokens that a request emits. For a tree that place is the
    depth of the accepted node, so nothing has to be asked of the device."""

    def __init__(self) -> None:
        self._steps = self._trees = self._verified = self._accepted = 0
        self._by_depth: dict[str, int] = {}
        self._nodes: dict[str, int] = {}
        self._before, self._misfit = (0, 0), 0  # Trees and accepted nodes when the window began.

    def step(self, stats: Any) -> None:
        drafts = stats.spec_decoding_stats
        if drafts is None or not drafts.num_drafts:
            return
        self._steps += 1
        self._trees += drafts.num_drafts
        self._verified += drafts.num_draft_tokens
        self._accepted += drafts.num_accepted_tokens
        for place, accepted in enumerate(drafts.num_accepted_tokens_per_pos):
            if not accepted:
                # A node is accepted after its parent, so no deeper one was.
                break
            depth = str(place + 1)
            self._by_depth[depth] = self._by_depth.get(depth, 0) + accepted
        nodes = str(round(drafts.num_draft_tokens / drafts.num_drafts))
        self._nodes[nodes] = self._nodes.get(nodes, 0) + 1
        if self._steps % WINDOW == 0:
            self._look_at_yield()

    def _look_at_yield(self) -> None:
        """Warn, once, if next to nothing was accepted since the last look."""
        trees, accepted = self._trees - self._before[0], self._accepted - self._before[1]
        self._before = self._trees, self._accepted
        self._misfit = int(1 + accepted / trees < LEAST_YIELD)
        if self._misfit:
            warning_once(
                f"{WINDOW} steps with trees yielded {1 + accepted / trees:.2f} tokens per tree, "
                "where 1 is what the target yields alone. Check that speculative_config.model was "
                "trained for this very target and its tokenizer, and that a sleep of level 2 kept "
                "its weights (--sleep-preserve-parameter-names 'draft.*'); method 'ngram' needs "
                "texts that repeat. Else drop --speculative-config",
                most=1,
            )

    def numbers(self) -> Numbers:
        return {
            "steps": self._steps,
            "trees": self._trees,
            "nodes_verified": self._verified,
            "nodes_accepted": self._accepted,
            "nodes_accepted_by_depth": self._by_depth,
            "nodes_per_tree": self._nodes,
            "draft_misfit": self._misfit,
        }


def tell(section: Any, loggers: Sequence[Any]) -> None:
    """Let vLLM's log line and its counters by position, which are a chain's, speak of trees."""
    if section.topk == 1:
        return
    from vllm_graft.spec_decode.counts.tree_log import TreeLogging, show_depths

    for logger in loggers:
        if hasattr(logger, "spec_decoding_logging"):
            logger.spec_decoding_logging = TreeLogging()
        if hasattr(logger, "spec_decoding_prom"):
            show_depths(logger.spec_decoding_prom, section.steps)


METRICS = PartMetrics(ROWS, TreeWatch, tell)


# fmt: off
CHAIN_METRICS = PartMetrics((
    Metric("loop_replays", _C, "Loops over the second to the last draft that ran as one CUDA graph."),
    Metric("loop_launches", _C, "Loops that were launched step by step, by reason: there are no graphs (as during warm-up), or none fits the batch.", label="reason", values=("uncaptured", "no_fit")),
    Metric("first_pass_replays", _C, "First passes of the draft, over what was accepted, that ran as one CUDA graph."),
    Metric("first_pass_launches", _C, "First passes that were launched, most often because prompts are in the batch."),
    Metric("padding_requests", _C, "Padding in the replays of loops, in requests."),
    Metric("graphs", Kind.GAUGE, "Captured graphs, by the pass that they hold.", label="of", values=("first_pass", "loop")),
))
# fmt: on
