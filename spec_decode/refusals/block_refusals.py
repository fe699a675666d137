"""What trees of block drafters can't be combined with, refused in the frontend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_graft.base.options import flag
from vllm_graft.base.refusal import Refusal
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.models.block_depth import block_rows, trained_depth
from vllm_graft.spec_decode.models.chosen import is_block
from vllm_graft.spec_decode.models.draft_facts import CANDIDATE_KEYS, num_candidates_of
from vllm_graft.spec_decode.models.refiner_sizes import is_refined, refiner_sizes


def _parallel(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    speculative = vllm_config.speculative_config
    if speculative.parallel_drafting and not is_block(tree, speculative):
        yield "speculative_config.parallel_drafting drafts a chain at once: set it to false."


def _depth(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    speculative = vllm_config.speculative_config
    if not is_block(tree, speculative):
        return
    # With `nodes`, num_speculative_tokens is the depth until they are counted.
    given = "steps" in tree.model_fields_set or tree.nodes is None
    steps = tree.steps if given else speculative.num_speculative_tokens
    depth = trained_depth(speculative)
    if depth is not None and steps > depth:
        where = flag("tree", "steps") if given else "num_speculative_tokens, the depth of a tree,"
        yield (
            f"{where} is {steps}, but a block of the draft predicts {depth} tokens (block_size): "
            f"set it to {depth} or less."
        )


def _candidates(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    speculative = vllm_config.speculative_config
    count, keys = num_candidates_of(speculative), " or ".join(CANDIDATE_KEYS)
    if is_refined(speculative):
        draft = getattr(speculative.draft_model_config, "hf_config", None)
        count, keys = refiner_sizes(draft).candidates, "xpress_topc"
    if count is not None and tree.topk > count and is_block(tree, speculative):
        yield (
            f"{flag('tree', 'topk')} is {tree.topk}, but the draft has {count} candidates per "
            f"position ({keys}): set it to {count} or less."
        )


def _learned_tokens(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    speculative = vllm_config.speculative_config
    if tree.hot_tokens is None or not is_block(tree, speculative):
        return
    name = flag("tree", "hot_tokens")
    if isinstance(tree.hot_tokens, int):
        yield (
            f"{name} is {tree.hot_tokens}, but a block drafter multiplies by its output head once "
            "per step, so that learning pays nothing: drop it, or give a file."
        )
    elif _scores_itself(speculative):
        yield f"{name} cuts rows of an output head that this draft scores by itself: drop it."


def _own_scores(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    speculative = vllm_config.speculative_config
    own = num_candidates_of(speculative) is not None
    if tree.head_dtype == "fp8" and own and is_block(tree, speculative):
        yield (
            f"{flag('tree', 'head_dtype')} is 'fp8', but this draft chooses its candidates by its "
            "own output head: set it to 'auto'."
        )


def _graph_runner(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    default = TreeConfig.model_fields["graph_runner"].default
    if tree.graph_runner != default and is_block(tree, vllm_config.speculative_config):
        yield (
            f"{flag('tree', 'graph_runner')} is {tree.graph_runner!r}, but the graphs of a block "
            "drafter are vLLM's own, which hold the tree as well: drop it."
        )


def _rows(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    speculative, scheduler = vllm_config.speculative_config, vllm_config.scheduler_config
    if not is_block(tree, speculative):
        return
    width, most = block_rows(tree, speculative), scheduler.max_num_batched_tokens
    if (rows := scheduler.max_num_seqs * width) > most:
        yield (
            f"The pass of the draft has {rows} rows (--max-num-seqs {scheduler.max_num_seqs} times "
            f"{width} positions), but --max-num-batched-tokens is {most}: set --max-num-seqs to "
            f"{most // width} or less, or --max-num-batched-tokens to {rows} or more."
        )


def own_head_problems(tree: TreeConfig, vllm_config: Any) -> list[str]:
    """Why the output head of a draft that scores candidates by itself can't be in FP8."""
    return list(_own_scores(tree, vllm_config))


def _scores_itself(speculative: Any) -> bool:
    if speculative.method == "dspark" or is_refined(speculative):
        return True
    return num_candidates_of(speculative) is not None


_OWN = "These drafts score candidates by themselves."

BLOCKS: tuple[Refusal, ...] = (
    Refusal(
        "parallel drafting with drafters of levels",
        "It drafts a whole chain at once.",
        "set `parallel_drafting` to false",
        _parallel,
    ),
    Refusal(
        "trees deeper than a block drafter's block",
        "A position behind the block was never trained.",
        "lower `steps`, or `num_speculative_tokens` beside `nodes`",
        _depth,
    ),
    Refusal(
        "`topk` above the candidates of a DFlash 2, LiLiCorr or XPress draft",
        "A position has no more tokens to choose from.",
        "lower `topk`",
        _candidates,
    ),
    Refusal(
        "`hot_tokens` with DFlash 2, LiLiCorr, XPress and DSpark, and as a number with DFlash",
        f"{_OWN} DFlash multiplies by its output head once per step.",
        "drop the key",
        _learned_tokens,
    ),
    Refusal(
        "`head_dtype: fp8` with DFlash 2 and LiLiCorr",
        _OWN,
        "set `head_dtype: auto`",
        _own_scores,
    ),
    Refusal(
        "`graph_runner` with block drafters",
        "vLLM's own graphs of a block hold the tree as well.",
        "drop the key",
        _graph_runner,
    ),
    Refusal(
        "more rows of a block (`max_num_seqs` times its positions) than `max_num_batched_tokens`",
        "vLLM sizes its buffers for that many rows.",
        "raise `--max-num-batched-tokens`, or lower one of the others",
        _rows,
    ),
)
