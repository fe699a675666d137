"""How an engine may not run beside trees: runners, ranks, graphs, and rows per batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_graft.base.options import flag
from vllm_graft.base.refusal import Find, Refusal
from vllm_graft.spec_decode.config.tree_config import MAX_NODES, TreeConfig
from vllm_graft.spec_decode.models.chosen import has_model, is_block
from vllm_graft.spec_decode.refusals.padded_rows import full_rows, tight_budgets, tight_threshold
from vllm_graft.spec_decode.targets.recurrent.state_refusals import auto_widths


def more_than_one(name: str) -> Find:
    """Refuse more than one rank of a kind.

    Args:
        name: attribute of vLLM's ``ParallelConfig`` with the number of these ranks; its flag has
            the same name.
    """

    def find(section: Any, vllm_config: Any) -> Iterator[str]:
        value = getattr(vllm_config.parallel_config, name)
        if value > 1:
            yield f"--{name.replace('_', '-')} is {value}: set it to 1."

    return find


def ubatching(whose: str) -> Find:
    """Refuse dual batch overlap, which splits rows; `whose` is the genitive of their owner."""

    def find(section: Any, vllm_config: Any) -> Iterator[str]:
        if vllm_config.parallel_config.use_ubatching:
            yield (
                f"Dual batch overlap splits the {whose} rows: drop --enable-dbo and --ubatch-size."
            )

    return find


def _nodes(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    nodes = tree.nodes or vllm_config.speculative_config.num_speculative_tokens
    if tree.nodes is not None and nodes > tree.max_nodes:
        yield (
            f"{flag('tree', 'nodes')} is {nodes}, but a tree of topk {tree.topk} and a depth of "
            f"{tree.steps} (num_speculative_tokens) holds {tree.max_nodes} nodes: lower it, or "
            f"raise {flag('tree', 'topk')} or num_speculative_tokens."
        )
    elif not 1 <= nodes <= MAX_NODES:
        yield (
            f"speculative_config.num_speculative_tokens is the number of tree nodes, got {nodes}: "
            f"set it to 1..{MAX_NODES}."
        )
    elif nodes > tree.max_nodes:
        yield (
            f"speculative_config.num_speculative_tokens is {nodes}, but a tree of topk "
            f"{tree.topk} and {tree.steps} steps holds {tree.max_nodes} nodes: lower it, or "
            f"raise {flag('tree', 'topk')} or {flag('tree', 'steps')}."
        )


def _ngram(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    # N-grams alone may be chains; `ngram_refusals` tells what else goes with them.
    alone = not has_model(tree, vllm_config.speculative_config)
    if tree.ngram is not None and tree.topk == 1 and not alone:
        yield (
            f"{flag('tree', 'ngram')} adds branches to a tree, but here drafts are chains (topk "
            f"1): drop it, or set {flag('tree', 'topk')} to 2 or more, on a target that can verify "
            "trees."
        )


def _runner(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    if not vllm_config.use_v2_model_runner:
        yield (
            "vLLM chose Model Runner V1 (its log says why): unset VLLM_USE_V2_MODEL_RUNNER and "
            "drop what V2 does not support; it also needs a working Triton."
        )


def _full_graphs(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    mode = getattr(vllm_config.compilation_config.cudagraph_mode, "name", None)
    if mode == "FULL":
        yield (
            "compilation_config.cudagraph_mode is FULL, which captures mixed batches: set it to "
            "FULL_AND_PIECEWISE, FULL_DECODE_ONLY, PIECEWISE or NONE."
        )


def _auto_replicas(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    replicas = vllm_config.parallel_config.data_parallel_size if tree.shape == "auto" else 1
    if replicas > 1:
        yield (
            f"{flag('tree', 'shape')} is 'auto' and data_parallel_size is {replicas}: set the "
            "shape to 'fixed'."
        )


def _auto_scheduler(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    scheduler = vllm_config.scheduler_config.scheduler_cls if tree.shape == "auto" else None
    if scheduler is not None:
        yield (
            f"{flag('tree', 'shape')} is 'auto' and --scheduler-cls is {scheduler!r}: drop one of "
            "them."
        )


def _sharded_sampling(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    if vllm_config.parallel_config.enable_batch_sharded_sampling:
        yield "--enable-batch-sharded-sampling splits the tree's rows: drop it."


def _levels(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    speculative = vllm_config.speculative_config
    if is_block(tree, speculative) or not has_model(tree, speculative):
        return
    scheduler = vllm_config.scheduler_config
    rows, most = scheduler.max_num_seqs * tree.topk, scheduler.max_num_batched_tokens
    if rows > most:
        yield (
            f"A level of the draft has {rows} rows (--max-num-seqs {scheduler.max_num_seqs} times "
            f"{flag('tree', 'topk')} {tree.topk}), but --max-num-batched-tokens is {most}: set "
            f"--max-num-seqs to {most // tree.topk} or less, or --max-num-batched-tokens to "
            f"{rows} or more."
        )


def _lora_rows(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    # vLLM checks this while num_speculative_tokens is still the depth.
    if tree.nodes is None or getattr(vllm_config, "lora_config", None) is None:
        return
    scheduler = vllm_config.scheduler_config
    rows, most = scheduler.max_num_seqs * (tree.nodes + 1), scheduler.max_num_batched_tokens
    if rows > most:
        yield (
            "With LoRA, --max-num-batched-tokens must be at least --max-num-seqs times the rows "
            f"of a tree, {rows}, but it is {most}: raise it, or lower {flag('tree', 'nodes')}."
        )


def _threshold(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    if limit := tight_threshold(tree, vllm_config):
        yield (
            f"{limit.flag} is {limit.value}, but vLLM gives a request with one token left to "
            f"compute the {limit.least} rows of a full tree, and stops where they are cut: set it "
            f"to {limit.least} or more, drop it, or {_fewer(tree, limit.value)}."
        )


def _budgets(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    for limit in tight_budgets(tree, vllm_config):
        spare = limit.value - (limit.least - full_rows(tree, vllm_config))
        yield (
            f"{limit.flag} is {limit.value}, but vLLM gives a request with one token left to "
            f"compute the rows of a full tree or no turn, so that it may wait forever: set it to "
            f"{limit.least} or more, or {_fewer(tree, spare)}."
        )


def _fewer(tree: TreeConfig, rows: int) -> str:
    """What to do for trees of at most so many rows; their number changes with ``shape: auto``."""
    if rows < 2:
        return f"set {flag('tree', 'shape')} to 'auto'"
    nodes = flag("tree", "nodes") if tree.nodes is not None else "num_speculative_tokens"
    return f"set {nodes} to {rows - 1} or less"


_ONE_RANK = "A request's rows are split over ranks, and a tree needs all of them."

ENGINE: tuple[Refusal, ...] = (
    Refusal(
        "more than 63 nodes, or more than `topk` and `steps` hold",
        "An ancestor mask has 64 bits, one of them the root's.",
        "lower `num_speculative_tokens`",
        _nodes,
    ),
    Refusal(
        "`ngram` with chains: `topk: 1`, or a target that verifies no trees",
        "N-grams are branches beside the draft's.",
        "drop `ngram`, or raise `topk`",
        _ngram,
    ),
    Refusal(
        "Model Runner V1",
        "It has no place for verification and compaction.",
        "unset `VLLM_USE_V2_MODEL_RUNNER`, and drop what V2 does not support",
        _runner,
    ),
    Refusal(
        "pipeline parallelism",
        "The draft runs on the last rank, and the accepted path is not sent to the others.",
        "set `--pipeline-parallel-size` to 1",
        more_than_one("pipeline_parallel_size"),
    ),
    Refusal(
        "decode context parallelism",
        _ONE_RANK,
        "set `--decode-context-parallel-size` to 1",
        more_than_one("decode_context_parallel_size"),
    ),
    Refusal(
        "prefill context parallelism",
        _ONE_RANK,
        "set `--prefill-context-parallel-size` to 1",
        more_than_one("prefill_context_parallel_size"),
    ),
    Refusal(
        "dual batch overlap",
        "It splits the tree's rows.",
        "drop `--enable-dbo` and `--ubatch-size`",
        ubatching("tree's"),
    ),
    Refusal(
        "batch-sharded sampling",
        "It splits the tree's rows.",
        "drop `--enable-batch-sharded-sampling`",
        _sharded_sampling,
    ),
    Refusal(
        "`cudagraph_mode: FULL`",
        "Its graphs of mixed batches would put prompts through tree attention.",
        "use `FULL_AND_PIECEWISE`, where mixed batches have graphs of ours",
        _full_graphs,
    ),
    Refusal(
        "more rows per level (`max_num_seqs` times `topk`) than `max_num_batched_tokens`",
        "vLLM sizes its buffers for that many rows.",
        "raise `--max-num-batched-tokens`, or lower one of the others",
        _levels,
    ),
    Refusal(
        "LoRA with more rows (`max_num_seqs` times `nodes` + 1) than `max_num_batched_tokens`",
        "vLLM sizes its buffers of adapters for that many rows.",
        "raise `--max-num-batched-tokens`, or lower `nodes`",
        _lora_rows,
    ),
    Refusal(
        "a fixed tree of more rows (its nodes + 1) than `--long-prefill-token-threshold`",
        "vLLM gives a request with one token left to compute the rows of a full tree, and the "
        "engine stops where the threshold cuts them. So it does with a chain.",
        "raise the threshold to the rows of a tree, or drop it",
        _threshold,
    ),
    Refusal(
        "a fixed tree of more rows (its nodes + 1) than `max_num_batched_tokens`, less vLLM's "
        "slots for the draft, or `max_num_scheduled_tokens`",
        "vLLM gives such a request all rows of a tree or no turn, so that it may wait forever.",
        "raise them, or lower the number of nodes",
        _budgets,
    ),
    Refusal(
        "`shape: auto` with data parallelism",
        "vLLM drops its number of drafts by batch size there, so ranks would choose differently.",
        "set `shape: fixed`",
        _auto_replicas,
    ),
    Refusal(
        "`shape: auto` with a `--scheduler-cls`",
        "The choice is made in vLLM's own scheduler.",
        "drop one of them",
        _auto_scheduler,
    ),
)


def shape_problems(vllm_config: Any) -> list[str]:
    """Why the shape can't be ``auto``."""
    auto = TreeConfig(shape="auto")
    checks = (_auto_replicas, _auto_scheduler, auto_widths)
    return [problem for check in checks for problem in check(auto, vllm_config)]


def level_problems(tree: TreeConfig, vllm_config: Any) -> list[str]:
    """Why the levels of a tree do not fit into ``max_num_batched_tokens``."""
    return list(_levels(tree, vllm_config))
