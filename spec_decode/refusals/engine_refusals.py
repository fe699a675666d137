"""Engines that may not run beside trees: runners, ranks, graphs, and rows per batch."""

import os
from collections.abc import Iterator
from typing import Any

from vllm_graft.base.options import flag, target_of
from vllm_graft.base.refusal import Found, Refusal, Refusals, sentences, setting
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.models.drafts import has_model, is_block
from vllm_graft.spec_decode.targets.recurrent.recurrent_features import auto_widths
from vllm_graft.spec_decode.trees.tree import MAX_NODES

_NODES = "speculative_config.num_speculative_tokens"
_TOPK, _SHAPE = flag("tree", "topk"), flag("tree", "shape")

BUFFERS = "vLLM sizes its buffers for that many rows."

ENGINE = Refusals()


def old_runner(why: str) -> Refusal:
    """Refuse Model Runner V1."""
    instead = (
        "unset `VLLM_USE_V2_MODEL_RUNNER`, and drop what V2 does not support; it also needs a "
        "working Triton, which on a CPU `VLLM_GRAFT_INTERPRET=1` interprets"
    )

    def v1(asked: Any, vllm_config: Any) -> Iterator[str]:
        if not vllm_config.use_v2_model_runner:
            yield f"vLLM chose Model Runner V1 ({_why_v1()})"

    return Refusal("Model Runner V1", why, instead, v1)


def _why_v1() -> str:
    """A preset tells no advice, and `vllm-graft plan` has no log of vLLM's."""
    from vllm.platforms import current_platform

    interpreted = os.environ.get("VLLM_GRAFT_INTERPRET") == "1"
    if current_platform.device_type == "cpu" and not interpreted:
        return "the environment lacks VLLM_GRAFT_INTERPRET=1, without which a CPU has no Triton"
    return "its log says why"


def ranks(kind: str, why: str) -> Refusal:
    """Refuse more than one rank of a kind, such as "decode context"."""
    name = f"{kind.replace(' ', '_')}_parallel_size"
    more_than_one = setting(f"parallel_config.{name}", lambda ranks: ranks <= 1)
    instead = f"set `--{name.replace('_', '-')}` to 1"
    return Refusal(f"{kind} parallelism", why, instead, more_than_one)


def overlap(why: str) -> Refusal:
    """Refuse dual batch overlap."""
    is_on = setting("parallel_config.use_ubatching", says="Dual batch overlap is on")
    return Refusal("dual batch overlap", why, "drop `--enable-dbo` and `--ubatch-size`", is_on)


@ENGINE.row(
    f"fewer than 1 node, or more than {MAX_NODES}",
    "An ancestor mask has 64 bits, one of them the root's.",
    f"set `{_NODES}` to 1..{MAX_NODES}",
)
def _nodes(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    nodes = tree.nodes or vllm_config.speculative_config.num_speculative_tokens
    if not 1 <= nodes <= MAX_NODES:
        yield f"{_NODES}, the number of tree nodes, is {nodes}"


@ENGINE.row(
    "more nodes than `topk` and `steps` hold",
    "A level has `topk` children of `topk` nodes at most.",
    f"lower the number of nodes, or raise `{_TOPK}` or the depth",
)
def _too_few_places(tree: TreeConfig, vllm_config: Any) -> Iterator[Found]:
    nodes = tree.nodes or vllm_config.speculative_config.num_speculative_tokens
    if not tree.num_candidates < nodes <= MAX_NODES:
        return
    # Beside `nodes`, the number of tokens is the depth.
    key, depth = flag("tree", "nodes"), _NODES
    if tree.nodes is None:
        key, depth = _NODES, flag("tree", "steps")
    yield Found(
        f"{key} is {nodes}, but a tree of {_TOPK} {tree.topk} and a depth of {tree.steps} ({depth})"
        f" holds {tree.num_candidates} nodes",
        f"lower it, or raise {_TOPK} or {depth}",
    )


@ENGINE.row(
    "`ngram` with chains: `topk: 1`, or a target that verifies no trees",
    "N-grams are branches beside the draft's.",
    f"drop `{flag('tree', 'ngram')}`, or set `{_TOPK}` to 2 or more, on a target that can verify "
    "trees",
)
def _ngram(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    # N-grams alone may be chains; `draft_refusals` tells what else goes with them.
    alone = not has_model(tree, vllm_config.speculative_config)
    if tree.ngram is not None and tree.topk == 1 and not alone:
        yield f"{flag('tree', 'ngram')} is given, but drafts are chains ({_TOPK} 1)"


_SPLIT = "A request's rows are split over ranks, and a tree needs all of them."

ENGINE.extend(
    (
        old_runner("It has no place for verification and compaction."),
        ranks(
            "pipeline",
            "The draft runs on the last rank, and the accepted path is not sent to the others.",
        ),
        ranks("decode context", _SPLIT),
        ranks("prefill context", _SPLIT),
        overlap("It splits the tree's rows."),
        Refusal(
            "batch-sharded sampling",
            "It splits the tree's rows.",
            "drop `--enable-batch-sharded-sampling`",
            setting("parallel_config.enable_batch_sharded_sampling"),
        ),
        Refusal(
            "`cudagraph_mode: FULL`",
            "Its graphs of mixed batches would put prompts through tree attention.",
            "set `compilation_config.cudagraph_mode` to FULL_AND_PIECEWISE (where mixed batches "
            "have graphs of ours), FULL_DECODE_ONLY, PIECEWISE or NONE",
            setting(
                "compilation_config.cudagraph_mode",
                lambda mode: getattr(mode, "name", None) != "FULL",
                "compilation_config.cudagraph_mode is FULL",
            ),
        ),
    )
)


def too_many_rows(
    whose: str, width: int, times: str, scheduler: Any, or_else: str = ""
) -> Iterator[Found]:
    """A pass of more rows than a batch may have: `width` rows per request, or `times` in words.
    `or_else` is another remedy."""
    rows, most = scheduler.max_num_seqs * width, scheduler.max_num_batched_tokens
    if rows > most:
        yield Found(
            f"{whose} has {rows} rows (--max-num-seqs {scheduler.max_num_seqs} times {times}), but "
            f"--max-num-batched-tokens is {most}",
            f"set --max-num-seqs to {most // width} or less, or --max-num-batched-tokens to "
            f"{rows} or more{or_else}",
        )


@ENGINE.row(
    "more rows per level (`max_num_seqs` times `topk`) than `max_num_batched_tokens`",
    BUFFERS,
    "raise `--max-num-batched-tokens`, or lower one of the others",
)
def _levels(tree: TreeConfig, vllm_config: Any) -> Iterator[Found]:
    speculative = vllm_config.speculative_config
    if has_model(tree, speculative) and not is_block(tree, speculative):
        scheduler, times = vllm_config.scheduler_config, f"{_TOPK} {tree.topk}"
        yield from too_many_rows("A level of the draft", tree.topk, times, scheduler)


@ENGINE.row(
    "LoRA with more rows (`max_num_seqs` times `nodes` + 1) than `max_num_batched_tokens`",
    "vLLM sizes its buffers of adapters for that many rows.",
    f"raise `--max-num-batched-tokens`, or lower `{flag('tree', 'nodes')}`",
)
def _lora_rows(tree: TreeConfig, vllm_config: Any) -> Iterator[Found]:
    # vLLM checks this while num_speculative_tokens is still the depth.
    if tree.nodes is not None and getattr(vllm_config, "lora_config", None) is not None:
        scheduler, key, rows = vllm_config.scheduler_config, flag("tree", "nodes"), tree.nodes + 1
        times, or_else = f"{rows}, of {key} {tree.nodes}", f", or lower {key}"
        yield from too_many_rows("With LoRA a batch of trees", rows, times, scheduler, or_else)


def _full_rows(tree: TreeConfig, vllm_config: Any) -> int:
    """Rows of a full tree, the root's included; 0 if vLLM gives no request so many by itself.

    A request with one token left to compute (a prompt of one token beside other requests, or one
    that is cached but for its last token) would be the only one in its batch without drafts. VLLM
    gives it the rows of a full tree, so that the batch keeps its CUDA graph, unless the number of
    drafts changes with the batch."""
    speculative = vllm_config.speculative_config
    changes = speculative.num_speculative_tokens_per_batch_size is not None
    if tree.shape == "auto" or changes:
        return 0
    return 1 + (tree.nodes or int(speculative.num_speculative_tokens))


@ENGINE.row(
    "a fixed tree of more rows (its nodes + 1) than `--long-prefill-token-threshold`",
    "vLLM gives a request with one token left to compute the rows of a full tree, and the engine "
    "stops where the threshold cuts them. So it does with a chain.",
    "raise the threshold to the rows of a tree, or drop it",
)
def _threshold(tree: TreeConfig, vllm_config: Any) -> Iterator[Found]:
    # The `adaptive` threshold is no way out: with many requests it falls to the number given.
    value = vllm_config.scheduler_config.long_prefill_token_threshold
    if 0 < value < (rows := _full_rows(tree, vllm_config)):
        name = "--long-prefill-token-threshold"
        yield Found(
            f"{name} is {value}, but a full tree has {rows} rows",
            f"set {name} to {rows} or more, drop it, or {_fewer(tree, value)}",
        )


@ENGINE.row(
    "a fixed tree of more rows (its nodes + 1) than `max_num_batched_tokens`, less vLLM's slots "
    "for the draft, or `max_num_scheduled_tokens`",
    "vLLM gives a request with one token left to compute all rows of a tree or no turn, so that it "
    "may wait forever.",
    "raise them, or lower the number of nodes",
)
def _budgets(tree: TreeConfig, vllm_config: Any) -> Iterator[Found]:
    rows = _full_rows(tree, vllm_config)
    for name, value, taken in _budgets_of(vllm_config):
        if rows and value < rows + taken:
            yield Found(
                f"{name} is {value}, but a full tree needs {rows + taken} rows",
                f"set {name} to {rows + taken} or more, or {_fewer(tree, value - taken)}",
            )


def _budgets_of(vllm_config: Any) -> Iterator[tuple[str, int, int]]:
    """What bounds a step: the flag, its rows, and those of them that vLLM leaves to the draft."""
    scheduler = vllm_config.scheduler_config
    batched, scheduled = scheduler.max_num_batched_tokens, scheduler.max_num_scheduled_tokens
    slots = vllm_config.speculative_config.max_num_new_slots_for_drafting
    yield "--max-num-batched-tokens", batched, slots
    # vLLM fills in the one from the other.
    if scheduled is not None and scheduled != batched:
        yield "--max-num-scheduled-tokens", scheduled, 0


@ENGINE.row(
    "texts (`max_model_len`) longer than `max_num_batched_tokens`, less vLLM's slots for the "
    "draft, or `max_num_scheduled_tokens`, without chunked prefill",
    "vLLM then computes a prompt at once or gives it no turn, so that it waits forever, and all "
    "behind it.",
    "raise them, lower `--max-model-len`, or drop `--no-enable-chunked-prefill`",
)
def _whole_prompts(tree: TreeConfig, vllm_config: Any) -> Iterator[Found]:
    if vllm_config.scheduler_config.enable_chunked_prefill:
        return
    # A prompt is shorter than the model's length by a token, and so is a text that was preempted.
    longest = target_of(vllm_config).max_model_len - 1
    for name, value, taken in _budgets_of(vllm_config):
        if value < longest + taken:
            yield Found(
                f"{name} is {value}, but without chunked prefill the longest prompt needs "
                f"{longest + taken} rows",
                f"set {name} to {longest + taken} or more, --max-model-len to "
                f"{value - taken + 1} or less, or drop --no-enable-chunked-prefill if you gave it",
            )


def _fewer(tree: TreeConfig, rows: int) -> str:
    """The remedy of trees of at most so many rows; their number changes with ``shape: auto``."""
    if rows < 2:
        return f"set {_SHAPE} to 'auto'"
    nodes = flag("tree", "nodes") if tree.nodes is not None else _NODES
    return f"set {nodes} to {rows - 1} or less"


@ENGINE.row(
    "`shape: auto` with a `--scheduler-cls`",
    "The choice is made in vLLM's own scheduler.",
    f"drop `--scheduler-cls`, or set `{_SHAPE}` to 'fixed'",
)
def _auto_scheduler(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    scheduler = vllm_config.scheduler_config.scheduler_cls if tree.shape == "auto" else None
    if scheduler is not None:
        yield f"{_SHAPE} is 'auto' and --scheduler-cls is {scheduler!r}"


def shape_problems(vllm_config: Any) -> list[str]:
    """Why the shape can't be ``auto``."""
    rows = (_auto_scheduler, auto_widths)
    return list(sentences(rows, TreeConfig(shape="auto"), vllm_config))


def level_problems(tree: TreeConfig, vllm_config: Any) -> list[str]:
    """Why the levels of a tree do not fit into ``max_num_batched_tokens``."""
    return list(_levels.sentences(tree, vllm_config))
