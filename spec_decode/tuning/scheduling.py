"""``shape: auto`` in the scheduler: a `NodeTuner` decides its table of drafts by batch size."""

from __future__ import annotations

import functools
import time
from collections.abc import Collection, Mapping, Set
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from vllm_graft.base.errors import HookError
from vllm_graft.base.options import flag
from vllm_graft.base.values import shown
from vllm_graft.graph_runners.language.widths import request_counts
from vllm_graft.hooks import manager
from vllm_graft.spec_decode.chunking import graph_fit
from vllm_graft.spec_decode.chunking.graph_fit import ROWS, can_chunk, chunk_prompts
from vllm_graft.spec_decode.config.tree_config import NAME, TreeConfig
from vllm_graft.spec_decode.models.drafts import (
    draft_has_experts,
    has_model,
    is_block,
    step_has_experts,
)
from vllm_graft.spec_decode.trees.tree import TreeShape
from vllm_graft.spec_decode.tuning.copied_texts import CopiedTexts
from vllm_graft.spec_decode.tuning.rank_agreement import SharedLookup, share_wishes, step_together
from vllm_graft.spec_decode.tuning.shapes import dynamic, for_blocks, for_experts, whole
from vllm_graft.spec_decode.tuning.step_times import MEASURED
from vllm_graft.spec_decode.tuning.tuner import NodeTuner

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from vllm_graft.spec_decode.tuning.shapes import TreePolicy

MAX_ROWS = 512
"""Most rows of a step without CUDA graphs; with them, the largest captured size is the limit."""


def nodes_by_batch(vllm_config: VllmConfig) -> list[int]:
    """Nodes that the scheduler keeps of a tree, by number of requests in the batch."""
    config = vllm_config.speculative_config
    assert config is not None
    nodes, max_reqs = config.num_speculative_tokens, vllm_config.scheduler_config.max_num_seqs
    if not config.uses_dynamic_speculative_decoding():
        return [nodes] * (max_reqs + 1)
    lookup: list[int] = build_dynamic_sd_schedule_lookup(
        config.num_speculative_tokens_per_batch_size, max_reqs, nodes
    )
    return lookup


def max_rows(vllm_config: VllmConfig) -> int:
    """Most rows, roots and nodes of all requests, that a step of ``shape: auto`` may verify."""
    return vllm_config.compilation_config.max_cudagraph_capture_size or MAX_ROWS


def batches_by_nodes(vllm_config: VllmConfig, *, auto: bool) -> dict[int, list[int]]:
    """Numbers of requests for which the scheduler may ask for a number of nodes, by that number."""
    schedule = nodes_by_batch(vllm_config)
    tuner = NodeTuner(schedule, max_rows(vllm_config))
    batches: dict[int, list[int]] = {}
    for batch in range(1, len(schedule)):
        for nodes in tuner.allowed(batch) if auto else [schedule[batch]]:
            batches.setdefault(nodes, []).append(batch)
    return batches


def graph_counts(vllm_config: VllmConfig) -> dict[int, list[int]]:
    """Numbers of requests to capture, by width (root and nodes), where the tree is ``auto``."""
    rows = max_rows(vllm_config)
    return {
        nodes + 1: request_counts(min(max(batches), rows // (nodes + 1)))
        for nodes, batches in batches_by_nodes(vllm_config, auto=True).items()
    }


class TunedLookup(list[int]):
    """Stands for vLLM's table of drafts by batch size; reading an entry begins a step of the tuner.
    vLLM's scheduler reads ``dynamic_sd_lookup[n]`` exactly once per step, when the number of
    requests is known, and offers no other place to decide it. So nothing else may read an entry."""

    def __init__(self, schedule: list[int], tuner: NodeTuner) -> None:
        super().__init__(schedule)
        self.tuner = tuner

    def __getitem__(self, batch: Any) -> Any:
        return self.tuner.begin_step(batch)


class StepKind(NamedTuple):
    """The requests of a step, and what they did. Each of the requests that decode drafted `nodes`,
    and verified fewer where trees were cut. `batch` is the number of all requests, `prompts` the
    rows of those that do not decode."""

    nodes: int
    verified: int
    decodes: list[str]
    batch: int
    prompts: int

    @classmethod
    def of(cls, output: SchedulerOutput) -> StepKind | None:
        """The kind of a step; None if its requests verified different numbers, or none decoded."""
        scheduled, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        counts = {*map(len, drafts.values())}
        if len(counts - {0}) > 1:
            return None
        nodes = max(counts, default=0)
        before = graph_fit.drafted(output)
        if {*scheduled.values()} == {nodes + 1} and (
            not nodes or (len(drafts) == len(scheduled) and 0 not in counts)
        ):
            # All decode: the most frequent kind is seen without a look at each request.
            names = [*scheduled]
            return cls(nodes if before is None else before, nodes, names, len(names), 0)
        decodes = [name for name in scheduled if len(drafts.get(name, ())) == nodes]
        if nodes == 0:
            # A prompt's last part may be a single token, too: rare, and as long as a decode.
            decodes = [name for name in decodes if scheduled[name] == 1]
        elif any(scheduled[name] != nodes + 1 for name in decodes):
            return None
        prompts = sum(scheduled.values()) - len(decodes) * (nodes + 1)
        if not decodes:
            return None
        return cls(nodes if before is None else before, nodes, decodes, len(scheduled), prompts)


class StepWatch:
    """Tells the tuner of steps whose decoding requests all verified as many drafts."""

    def __init__(
        self,
        tuner: NodeTuner,
        requests: Mapping[str, Request],
        shared: SharedLookup | None = None,
    ) -> None:
        self.tuner, self._shared = tuner, shared
        self._requests = requests
        self._texts = CopiedTexts(requests)
        self._previous: int | None = None
        self._decodes: list[str] = []
        self._ended = 0.0
        self._temperature = 0.0
        self._last_context = 0

    def ended(self, output: SchedulerOutput, sampled: Mapping[str, list[int]], now: float) -> None:
        """Note the end of a step, at a clock of so many seconds, and the tokens of each request."""
        kind = StepKind.of(output)
        if kind is not None and not self.tuner.knows(kind.nodes):
            # vLLM has cut the trees, because the context ends behind them.
            kind = None
        previous, self._previous = self._previous, None if kind is None else kind.nodes
        ended, self._ended = self._ended, now
        if kind is None:
            return
        emitted = [*map(len, map(sampled.get, kind.decodes, repeat(())))]
        if not all(emitted):
            return
        # Between two results lie the draft passes of the earlier step and this step's verification,
        # and maybe this step's draft passes. Their time is known if all have as many nodes.
        alike = previous == kind.nodes == output.num_spec_tokens_to_schedule
        same = self._go_on_with(kind.decodes)
        self.tuner.observe(
            kind.nodes,
            emitted,
            now - ended if alike else None,
            # A pass of all ranks takes as long as the largest one's.
            batch=max(kind.batch, self._shared.heard.requests if self._shared else 0),
            prompts=kind.prompts,
            verified=kind.verified,
            same=same,
            temperature=self._temperature,
            context=self._context(output.num_scheduled_tokens.keys()),
        )
        if not kind.nodes and self.tuner.copied:
            self.tuner.heed(self._texts.longest(kind.decodes, self.tuner.copied))

    def _context(self, names: Set[str]) -> int:
        """K/V tokens of the requests; the last number known if one that was read is gone."""
        requests = self._requests
        if requests.keys() >= names:
            self._last_context = sum([requests[name].num_computed_tokens for name in names])
        return self._last_context

    def _go_on_with(self, names: list[str]) -> bool:
        """Note the requests that decode, and the mean temperature of those that are still there.
        Returns whether most of them were in the decoding step before."""
        before, self._decodes = self._decodes, names
        if before == names:
            return True
        both = len({*before}.intersection(names))
        # Of the same requests it is the same.
        if both < max(len(before), len(names)):
            self._read_temperature(names)
        return 2 * both >= len(names)

    def _read_temperature(self, names: list[str]) -> None:
        """Read the mean temperature; it stays as it was if no request is there."""
        found = [self._requests[name].sampling_params for name in names if name in self._requests]
        temperatures = [params.temperature for params in found if params is not None]
        if temperatures:
            self._temperature = sum(temperatures) / len(temperatures)


def tree_policy(config: TreeConfig, speculative: Any) -> TreePolicy:
    """The policy that is named; `dynamic` has variants for blocks, experts, and no draft model."""
    policy: TreePolicy = manager.resolve("graft_tree_policies", config.policy, NAME, "policy")
    if policy is not dynamic:
        return policy
    if not has_model(config, speculative):
        return whole
    if is_block(config, speculative):
        return for_blocks
    return for_experts if draft_has_experts(config, speculative) else dynamic


def _levels(
    config: TreeConfig, vllm_config: VllmConfig, node_counts: Collection[int]
) -> dict[int, int]:
    """Levels of the trees of each number of nodes."""
    speculative = vllm_config.speculative_config
    if not has_model(config, speculative):
        # All are the first nodes of one tree, whose levels cost the draft nothing.
        return {nodes: min(config.steps, nodes) for nodes in node_counts}
    policy = tree_policy(config, speculative)
    return {nodes: policy(config, nodes).steps for nodes in node_counts}


def tune(scheduler: Scheduler) -> None:
    """Let `scheduler` cut trees, chunk prompts and learn how many nodes pay, as is asked for."""
    vllm_config = scheduler.vllm_config
    config = TreeConfig.from_vllm(vllm_config)
    if config is None:
        return
    graph_rows = graph_fit.graph_rows(vllm_config, config.mixed_graphs)
    cuts = config.fit_graphs and graph_rows > 0
    if cuts:
        graph_fit.fit_to_graphs(scheduler, graph_rows)
    mixed_rows = ROWS.take(vllm_config) or 0
    if config.fit_prompts and can_chunk(scheduler, mixed_rows):
        chunk_prompts(scheduler, mixed_rows, cuts=cuts)
    if config.shape == "auto":
        _learn(scheduler, config, cuts=cuts)
    elif step_together(vllm_config):
        share_wishes(scheduler)


def _learn(scheduler: Scheduler, config: TreeConfig, *, cuts: bool) -> None:
    """Let a tuner decide the scheduler's table, from what the steps take and yield."""
    vllm_config = scheduler.vllm_config
    schedule = nodes_by_batch(vllm_config)
    sizes = request_counts(vllm_config.scheduler_config.max_num_seqs)
    levels = _levels(config, vllm_config, set(schedule) - {0})
    experts = step_has_experts(config, vllm_config)
    rests = not has_model(config, vllm_config.speculative_config)
    tuner = NodeTuner(
        schedule, max_rows(vllm_config), sizes, levels, cuts=cuts, experts=experts, rests=rests
    )
    tuner.seed(MEASURED.take(vllm_config) or {})
    scheduler.dynamic_sd_lookup = TunedLookup(schedule, tuner)
    shared = share_wishes(scheduler) if step_together(vllm_config) else None
    watch = StepWatch(tuner, scheduler.requests, shared)
    stock = scheduler.update_from_output

    @functools.wraps(stock)
    def update_from_output(
        scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        if scheduler_output.num_scheduled_tokens:
            found = zip(model_runner_output.req_ids, model_runner_output.sampled_token_ids)
            watch.ended(scheduler_output, dict(found), time.perf_counter())
        return stock(scheduler_output, model_runner_output)

    # Only this scheduler is changed: others in the process may have other configurations.
    scheduler.update_from_output = update_from_output


def plan_shapes(
    policy: TreePolicy, config: TreeConfig, vllm_config: VllmConfig
) -> dict[TreeShape, list[int]]:
    """The shape for each number of nodes that the scheduler may ask for, and its batches.

    The largest number of nodes is always there: steps for which the scheduler asks for none in
    particular, such as dummy runs, draft it. Returns numbers of requests for which trees of a shape
    are drafted, by shape. Raises `HookError` if the policy returns no tree of the number of nodes
    that it was asked for."""
    speculative = vllm_config.speculative_config
    assert speculative is not None
    batches = batches_by_nodes(vllm_config, auto=config.shape == "auto")
    batches.setdefault(speculative.num_speculative_tokens, [])
    return {_asked(policy, config, nodes): counts for nodes, counts in batches.items() if nodes}


def _asked(policy: TreePolicy, config: TreeConfig, nodes: int) -> TreeShape:
    """The policy's shape; the engine verifies exactly so many nodes, and drafts one at least."""
    shape = policy(config, nodes)
    if (
        not isinstance(shape, TreeShape)
        or shape.num_nodes != nodes
        or min(shape.topk, shape.steps) < 1
    ):
        raise HookError(
            f"{flag('tree', 'policy')} {config.policy!r} returned {shown(shape)} for {nodes} nodes "
            f"(topk {config.topk}, steps {config.steps}), but must return a TreeShape of exactly "
            f"{nodes} nodes, with topk and steps of at least 1: mend the policy, or drop the key"
        )
    return shape


def widths(vllm_config: VllmConfig, *, auto: bool) -> set[int]:
    """Rows per request, root and nodes, that a pass of the target may verify."""
    speculative = vllm_config.speculative_config
    assert speculative is not None
    nodes = {*batches_by_nodes(vllm_config, auto=auto), speculative.num_speculative_tokens}
    return {count + 1 for count in nodes}


def bounds(shapes: Collection[TreeShape]) -> TreeShape:
    """The smallest shape that holds all of `shapes`."""
    return TreeShape(
        max(shape.topk for shape in shapes),
        max(shape.steps for shape in shapes),
        max(shape.num_nodes for shape in shapes),
    )
