"""Lists the kernels that an engine's start will need, and begins to compile them.

The engine's own code runs beforehand, over no memory: what a CUDA graph may hold reads no value of
a tensor on the host, so it also runs over tensors of the device ``meta``. A drafter's twin drafts
trees there, and a target's layers verify them; launches are listed and not made. Kernels that are
listed too much are compiled in vain, missing ones are compiled where they are first launched."""

import copy
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from vllm_graft.base.log import warning_once
from vllm_graft.base.values import lever, reason_of
from vllm_graft.graph_runners.language.mixed import mixed_sizes
from vllm_graft.graph_runners.language.widths import request_counts
from vllm_graft.spec_decode.kernels.compact import KVCacheTable
from vllm_graft.spec_decode.kernels.kernel_launch import Launch, listing
from vllm_graft.spec_decode.kernels.ngram_insert import learn_rates
from vllm_graft.spec_decode.startup.ahead import Ahead, compile_ahead
from vllm_graft.spec_decode.startup.stand_ins import (
    META,
    Attention,
    LayerShape,
    SecondPass,
    block_model,
    empty,
    head,
    on_meta,
)
from vllm_graft.spec_decode.targets.dense.layer import DenseState
from vllm_graft.spec_decode.targets.dense.two_pass import points
from vllm_graft.spec_decode.tuning.scheduling import graph_counts, widths
from vllm_graft.spec_decode.verification.context import TreeContext, VerifyMode
from vllm_graft.spec_decode.verification.sampler import Chunk, TreeRejectionSampler, VerifiedRows

COMPILE_PROCESSES = "VLLM_GRAFT_COMPILE_PROCESSES"
"""Environment variable: how many processes compile; 0 lets the worker compile at first launches."""

_HOPPER = 9
"""Compute capability with FlashAttention 3."""

_SHORT = 64
"""Keys of the requests with which vLLM warms up: so few are not split among programs."""


class Rehearsed(NamedTuple):
    """The specialisations that the start will need, and what could not be rehearsed, and why."""

    launches: list[Launch]
    problems: list[str]


def begin(drafter: Any) -> Ahead:
    """Begin to compile what a `TreeDrafting`, and its target, will launch; it never raises."""
    device, processes = drafter.device, lever(COMPILE_PROCESSES)
    if device.type == "cuda":
        # What the worker compiles itself is counted in any case.
        drafter.trees.clock.listen()
    if processes == 0:
        return Ahead(why=f"{COMPILE_PROCESSES} is 0")
    if device.type != "cuda" or torch.version.hip is not None:
        return Ahead(why=f"kernels of device {device} are not compiled ahead")
    major, minor = torch.cuda.get_device_capability(device)
    with drafter.trees.clock.part("rehearsal"):
        launches, problems = rehearse(drafter, flash=major == _HOPPER)
    if problems:
        warning_once(
            "vllm-graft does not know beforehand which kernels are needed for "
            f"{'; '.join(problems)}. They are compiled where they are first used"
        )
    return compile_ahead(launches, ("cuda", 10 * major + minor, 32), processes)


def rehearse(drafter: Any, *, flash: bool) -> Rehearsed:
    """List what a drafter and its target will launch until the engine serves; `flash` says whether
    FlashAttention 3 can take the pass over a tree's prefix. Nothing of the drafter changes, and
    nothing is allocated or launched on its device."""
    launches: dict[Launch, None] = {}
    problems: list[str] = []
    try:
        stage = _Stage(drafter, flash=flash)
    except Exception as error:
        # Such as a configuration without one size of all heads.
        return Rehearsed([], [f"a model like this: {reason_of(error)}"])
    with listing(lambda launch: launches.setdefault(launch)), torch.inference_mode():
        for name, scene in stage.scenes():
            try:
                scene()
            except Exception as error:
                problems.append(f"{name}: {reason_of(error)}")
    return Rehearsed(list(launches), problems)


class _Stage:
    """A drafter's twin and its target's layers, without memory."""

    def __init__(self, drafter: Any, *, flash: bool) -> None:
        engine = drafter.trees.engine_config
        self.flash = flash and drafter.config.attention != "triton"
        self.auto = drafter.config.shape == "auto"
        self.engine = engine
        self.targets = _named("target", LayerShape.of(engine.model_config, engine))
        self.drafts: dict[str, LayerShape] = {}
        if drafter.grafts_draft and drafter.draft_model_config is not None:
            self.drafts = _named("draft", LayerShape.of(drafter.draft_model_config, engine))
        self.levels, self.block = drafter.grows_by_levels, drafter.grows_from_block
        self.twin: Any = on_meta(drafter)
        self.twin.device = META
        # The twin allocates in a copy of its own.
        self.twin.trees = copy.copy(drafter.trees)
        self.twin.trees.sources = type(drafter.trees.sources)()
        self.twin.input_buffers = on_meta(drafter.input_buffers)

    def scenes(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """The parts that are rehearsed, those that take longest to compile first."""
        yield "memory", self._allocate
        if self.twin.trees.shape.topk > 1:
            yield "attention of the target", self._attend
        if self.levels:
            yield "drafts", self._draft
        if self.block:
            yield "drafts of blocks", self._draft_blocks
        yield "verification", self._verify

    def _allocate(self) -> None:
        twin = self.twin
        known = {**self.targets, **self.drafts}
        twin.allocate_context(known)
        if not self.levels and not self.block:
            return
        twin.draft_attn_layer_names = set(self.drafts)
        twin.trees.head = head(
            twin.config,
            twin.draft_model_config,
            twin.trees.shape.topk,
            self.engine.model_config.get_vocab_size(),
        )
        twin.allocate_growths(known)
        if (ngrams := twin.trees.sources.ngrams) is not None:
            ngrams.attach(_texts(twin.max_num_reqs, twin.max_model_len))

    def _draft(self) -> None:
        twin, context = self.twin, self.twin.context
        attentions = {
            name: Attention(shape, context, is_draft=True) for name, shape in self.drafts.items()
        }
        for attention in attentions.values():
            attention.extend(1, twin.trees.shape.num_nodes + 1)
        twin.run_frontier = _frontier(attentions, twin.draft_model_config)
        counts = graph_counts(self.engine) if self.auto else {}
        for plan in twin.trees.all_plans:
            planned = counts.get(plan.shape.num_nodes + 1) or self._counts(plan.shape.topk)
            for num_reqs in planned:
                twin.sample_draft(empty(num_reqs, twin.hidden_size, dtype=twin.dtype))
                self._grow(plan, num_reqs, twin.max_model_len)
        self._grow(twin.trees.plan_for(twin.trees.shape.num_nodes), 1, _SHORT)

    def _draft_blocks(self) -> None:
        twin = self.twin
        twin.model = block_model(twin.head, twin.draft_model_config)
        twin.draft_tokens = empty(twin.max_num_reqs, twin.trees.num_nodes, dtype=torch.int64)
        for plan in twin.trees.plans.values():
            with twin.drafting(plan):
                for num_reqs in twin.graph_counts_of(plan) or [1]:
                    rows = num_reqs * twin.num_query_per_req
                    states = empty(rows, twin.hidden_size, dtype=twin.dtype)
                    states = twin.read_states(num_reqs, states)
                    twin.lattice = twin.make_lattice(num_reqs, states)
                    twin.grow_and_choose(plan, num_reqs, None)

    def _grow(self, plan: Any, num_reqs: int, longest: int) -> None:
        twin, growth = self.twin, plan.growth
        growth.block_tables = {
            name: shape.block_table(twin.max_num_reqs) for name, shape in self.drafts.items()
        }
        twin.grow_and_choose(plan, num_reqs, growth.metadata(num_reqs, longest))

    def _attend(self) -> None:
        rows = widths(self.engine, auto=self.auto)
        most = self.engine.scheduler_config.max_num_seqs
        measured = points(rows, most, self.engine.model_config.max_model_len)
        counts = graph_counts(self.engine) if self.auto else {}
        for shape in self.targets.values():
            attention = Attention(shape, self.twin.context, is_draft=False)
            if self.flash and not shape.window:
                sizes = {(point.num_reqs, point.rows) for point in measured}
                self._attend_own(attention, rows)
            else:
                sizes = {
                    (count, width)
                    for width in rows
                    for count in counts.get(width) or self._counts(width)
                }
            if self.twin.config.attention != "flash":
                self.twin.context.mode = VerifyMode.ALL
                for num_reqs, width in sorted(sizes):
                    attention.verify(num_reqs, width, shape.max_len)
                for width in sorted({width for _, width in sizes}):
                    attention.verify(1, width, _SHORT)
            self._attend_mixed(attention)

    def _attend_own(self, attention: Attention, rows: set[int]) -> None:
        self.twin.context.mode = VerifyMode.ALL
        second: Any = SecondPass()
        attention.two_pass = second
        for width in sorted(rows):
            attention.verify(1, width, attention.shape.max_len)
        attention.two_pass = None

    def _attend_mixed(self, attention: Attention) -> None:
        if self.twin.config.mixed_graphs is False:
            return
        self.twin.context.mode = VerifyMode.MIXED
        sizes = self.engine.compilation_config.cudagraph_capture_sizes or []
        rows, longest = self.twin.trees.shape.num_nodes + 1, attention.shape.max_len
        for size in mixed_sizes(sizes):
            attention.verify(min(size, self.twin.max_num_reqs), rows, longest)

    def _counts(self, width: int) -> list[int]:
        """Numbers of requests that graphs of so many rows per request may be for."""
        most = self.engine.scheduler_config.max_num_seqs
        sizes = self.engine.compilation_config.cudagraph_capture_sizes or []
        fitting = {min(size // width, most) for size in sizes if size >= width}
        return sorted(fitting) or request_counts(most)

    def _verify(self) -> None:
        twin = self.twin
        context: TreeContext = twin.context
        table = [shape.cache() for shape in self.targets.values()]
        for nodes in (0, context.shape.num_nodes):
            batch = _batch(twin, num_reqs=1, nodes=nodes)
            step = context.begin(batch, empty(twin.max_num_reqs))
        _walk(context, batch, twin.max_num_reqs)
        step.num_sampled = empty(batch.num_reqs)
        if context.shape.topk > 1 and table:
            slots = empty(1, twin.max_num_tokens, dtype=torch.int64)
            built = KVCacheTable.build(table, [0] * len(table))
            DenseState(built, slots).commit(context.path, step)
        if self.levels or self.block:
            accepted: Any = twin.accepted
            hidden = accepted.rows.states[: batch.num_tokens]
            accepted.move(context, batch, hidden, twin.max_num_reqs)
            if (ngrams := twin.trees.sources.ngrams) is not None:
                learn_rates(ngrams.learned)
                ngrams.remember(batch, drafts=False)


def _named(kind: str, shapes: list[LayerShape]) -> dict[str, LayerShape]:
    return {f"{kind}.{index}": shape for index, shape in enumerate(shapes)}


def _texts(max_reqs: int, max_len: int) -> Any:
    texts = SimpleNamespace(gpu=empty(max_reqs, max_len))
    return SimpleNamespace(all_token_ids=texts, total_len=SimpleNamespace(gpu=empty(max_reqs)))


def _frontier(attentions: Mapping[str, Attention], model: Any) -> Callable[..., Any]:
    def run(tokens: Any, positions: Any, states: Any, metadata: Any, across_dp: Any) -> Any:
        for name, attention in attentions.items():
            attention.draft(metadata[name])
        output = empty(positions.shape[0], model.get_hidden_size(), dtype=model.dtype)
        return output, states

    return run


def _batch(twin: Any, *, num_reqs: int, nodes: int) -> Any:
    rows, buffers = num_reqs * (nodes + 1), twin.input_buffers
    return SimpleNamespace(
        num_reqs=num_reqs, num_reqs_after_padding=num_reqs, num_tokens=rows,
        num_tokens_after_padding=rows, num_draft_tokens=num_reqs * nodes,
        idx_mapping=empty(num_reqs, dtype=torch.int64),
        query_start_loc=buffers.query_start_loc[: num_reqs + 1], seq_lens=empty(num_reqs),
        cu_num_logits=empty(num_reqs + 1), positions=buffers.positions[:rows],
        input_ids=buffers.input_ids[:rows],
    )  # fmt: skip


def _walk(context: TreeContext, batch: Any, max_reqs: int) -> None:
    sampler: Any = TreeRejectionSampler.__new__(TreeRejectionSampler)
    prefill_len = SimpleNamespace(gpu=empty(max_reqs))
    sampler.sampler = SimpleNamespace(req_states=SimpleNamespace(prefill_len=prefill_len))
    sampler.context = context
    rows = VerifiedRows(
        logits=empty(batch.num_tokens, 1),
        ids=batch.input_ids,
        positions=batch.positions,
        drafts=batch.input_ids,
        sampled=empty(batch.num_reqs, context.shape.num_nodes + 1, dtype=torch.int64),
        num_sampled=empty(batch.num_reqs),
        num_rejected=empty(batch.num_reqs),
    )
    whole: Any = None
    requests, tokens = slice(0, batch.num_reqs), slice(0, batch.num_tokens)
    chunk = Chunk(requests, tokens, batch.cu_num_logits, whole)
    sampler.walk(empty(batch.num_tokens, dtype=torch.int64), rows, batch, chunk)
