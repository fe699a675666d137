"""Measures what a step of ``shape: auto`` costs at each captured size, when the engine starts.

The worker replays the graphs that it has just captured, over padding, which writes no K/V. But each
row has a token of its own, each request a tree, attention and experts compute these rows, and
recurrent layers have states: rows of one token would all ask for the same experts, and plain
padding would hide what a node costs. The engine hands the result to the tuner before it serves."""

import functools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, prepare_inputs_to_capture

from vllm_graft.base.log import logger
from vllm_graft.spec_decode.drafters.tree_drafting import TreeDrafting
from vllm_graft.spec_decode.kernels.verify import prepare_rows

Launch = Callable[[], object]

StepCosts = dict[int, dict[int, float]]
"""Seconds of a step by number of nodes, then by number of requests."""


@torch.inference_mode()
def measure_step_costs(worker: Any, replays: int) -> tuple[StepCosts, StepCosts]:
    """Time a step's graphs that draft from the whole vocabulary, and those of hot tokens.

    The latter are empty where no vocabulary is learned, both if nothing was captured. The sizes are
    the captured powers of two and each width's largest number of requests; all ranks measure the
    same ones in the same order, and of the replays of a size the fastest counts. The output head is
    timed besides the graphs; the host, the sampler and K/V of long contexts are left out."""
    runner = worker.model_runner
    speculator, graphs = runner.speculator, runner.cudagraph_manager
    if not isinstance(speculator, TreeDrafting) or graphs is None:
        return {}, {}
    with speculator.trees.clock.part("costs"):
        costs = _measure(runner, speculator, graphs, replays)
    logger.info("vllm-graft timed steps in %.1f s", speculator.trees.clock.seconds["costs"])
    return costs


def _measure(
    runner: Any, speculator: TreeDrafting, graphs: Any, replays: int
) -> tuple[StepCosts, StepCosts]:
    found: tuple[StepCosts, StepCosts] = {}, {}
    vocab = runner.model_config.get_vocab_size()
    tables: Any = LentStates(runner.block_tables, runner.kv_cache_config)
    for desc in _chosen(graphs.graphs):
        nodes = desc.uniform_token_count - 1
        launches = draft_launches(speculator, nodes, desc.num_reqs)
        if launches is None:
            continue
        narrow = None
        if nodes and speculator.trees.narrow_plans:
            narrow = draft_launches(speculator, nodes, desc.num_reqs, narrow=True)
        _pretend(runner, tables, desc)
        _give_rows(speculator, runner, desc.num_reqs)
        for owner in (runner, speculator):
            # N-grams alone have no pass, and so no inputs.
            if (buffers := getattr(owner, "input_buffers", None)) is not None:
                draw_tokens(buffers.input_ids[: desc.num_tokens], vocab)
        # vLLM keeps padding from experts, which are most of what a row costs where there are any.
        # Every pass that serves writes the mask anew.
        runner.input_buffers.is_padding[: desc.num_tokens].fill_(False)
        speculator.tell_requests_apart(desc.num_reqs, nodes)

        def target(desc: Any = desc) -> None:
            output = graphs.run_fullgraph(desc)
            runner.model.compute_logits(output[0] if isinstance(output, tuple) else output)

        for costs, drafts in zip(found, (launches, narrow), strict=True):
            if drafts is not None:
                timed = [time_launches([target, *drafts], runner.device) for _ in range(replays)]
                costs.setdefault(nodes, {})[desc.num_reqs] = min(timed)
        runner.block_tables.get_dummy_block_tables(desc.num_reqs)  # The null block again.
    speculator.context.rows.clear()
    speculator.treat_requests_alike()
    return found


def _chosen(graphs: Any) -> list[Any]:
    """The captured descriptors to measure, all of them whole decodes of one width."""
    uniform = [
        desc
        for desc in graphs
        if desc.cg_mode == CUDAGraphMode.FULL
        and desc.uniform_token_count is not None
        and desc.num_active_loras == 0
    ]
    largest: dict[int, int] = {}
    for desc in uniform:
        width = desc.uniform_token_count
        largest[width] = max(largest.get(width, 0), desc.num_reqs)
    return [
        desc
        for desc in uniform
        if desc.num_reqs == largest[desc.uniform_token_count]
        or desc.num_reqs & (desc.num_reqs - 1) == 0
    ]


def draft_launches(
    speculator: TreeDrafting, nodes: int, num_reqs: int, *, narrow: bool = False
) -> list[Launch] | None:
    """The draft's graphs of one step, such as the extend pass and a tree's levels. Returns None if
    one of them is not captured for this number of requests."""
    wanted = speculator.step_graphs(nodes, narrow=narrow)
    if wanted is None:
        return None
    # All requests are padding: a replay drafts for none of them.
    speculator.idx_mapping.fill_(-1)
    launches: list[Launch] = []
    for runner, width in wanted:
        if runner is None:
            return None
        desc = runner.dispatch(num_reqs, num_reqs * width, width, num_active_loras=0)
        if desc.cg_mode != CUDAGraphMode.FULL:
            return None
        launches.append(functools.partial(runner.run_fullgraph, desc))
    return launches


def _pretend(runner: Any, tables: Any, desc: BatchExecutionDescriptor) -> None:
    prepare_inputs_to_capture(
        desc.num_reqs or 0, desc.num_tokens, runner.model_state, runner.input_buffers, tables,
        runner.attn_groups, runner.kv_cache_config, full_cudagraph=True,
        max_query_len=desc.uniform_token_count,
    )  # fmt: skip


def _give_rows(speculator: TreeDrafting, runner: Any, num_reqs: int) -> None:
    """Let the target's attention compute the rows of a replay, each of which sees those before it.
    A graph is captured without such rows. A replay of it leaves the attention's output as whatever
    was in this memory, such as NaN: experts, which are chosen by what the layers before them yield,
    would be the same ones for all rows."""
    context, buffers = speculator.context, runner.input_buffers
    counts = torch.arange(num_reqs + 1, device=buffers.positions.device)
    batch = SimpleNamespace(
        idx_mapping=counts[:num_reqs],
        query_start_loc=buffers.query_start_loc,
        # No drafts: the rows belong to no tree.
        cu_num_logits=counts.to(torch.int32),
        positions=buffers.positions,
        num_reqs=num_reqs,
        num_reqs_after_padding=num_reqs,
    )
    nothing = torch.zeros(num_reqs, dtype=torch.int32, device=buffers.positions.device)
    width = context.tree.width
    prepare_rows(context.tree, batch, nothing, context.rows, plain_rows=True, max_rows=width)


def draw_tokens(tokens: torch.Tensor, vocab: int) -> None:
    """Fill with random token ids, the same ones in each rank."""
    drawn = torch.randint(vocab, tokens.shape, generator=torch.Generator().manual_seed(0))
    tokens.copy_(drawn)


def time_launches(launches: list[Launch], device: torch.device) -> float:
    """Device seconds from the first launch to the end of the last. Without CUDA, host seconds."""
    if device.type != "cuda":
        began = time.perf_counter()
        for launch in launches:
            launch()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for launch in launches:
        launch()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


class LentStates:
    """Stands before vLLM's block tables while the inputs of a pass of padding are prepared.

    Padding has the null block, where recurrent layers neither read nor write states, so that such a
    pass would cost less than one that serves. Here each row of padding has a block of its own. None
    of these is in use before the engine serves, and whoever gets one later begins anew. K/V are not
    concerned: padding has no slots."""

    def __init__(self, tables: BlockTables, kv_cache_config: KVCacheConfig) -> None:
        self._tables = tables
        self._blocks = kv_cache_config.num_blocks
        self._groups = [
            index
            for index, group in enumerate(kv_cache_config.kv_cache_groups)
            # Only groups of recurrent layers have it.
            if hasattr(group.kv_cache_spec, "mamba_cache_mode")
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tables, name)

    def get_dummy_block_tables(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        """Block tables of `num_reqs` requests per group, int32 ``[num_reqs, max_blocks]``. Groups
        of attention have the null block, 0. With too few blocks, rows take turns."""
        found: tuple[torch.Tensor, ...] = self._tables.get_dummy_block_tables(num_reqs)
        for group in self._groups:
            table = found[group]
            numbers = torch.arange(table.numel(), dtype=table.dtype, device=table.device)
            table.copy_((numbers % (self._blocks - 1) + 1).view_as(table))
        return found
