"""What trees of block drafters can't be combined with, refused in the frontend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_graft.base.options import flag
from vllm_graft.base.refusal import Found, Refusals
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.models.block_depth import block_rows, trained_depth
from vllm_graft.spec_decode.models.chosen import is_block
from vllm_graft.spec_decode.models.draft_facts import CANDIDATE_KEYS, num_candidates_of
from vllm_graft.spec_decode.models.refiner_sizes import is_refined, refiner_sizes
from vllm_graft.spec_decode.refusals.padded_rows import BUFFERS, too_many_rows

BLOCKS = Refusals()


@BLOCKS.row(
    "parallel drafting with drafters of levels",
    "It drafts a whole chain at once.",
    "set `speculative_config.parallel_drafting` to false",
)
def _parallel(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    speculative = vllm_config.speculative_config
    if speculative.parallel_drafting and not is_block(tree, speculative):
        yield "speculative_config.parallel_drafting is true"


@BLOCKS.row(
    "trees deeper than a block drafter's block",
    "A position behind the block was never trained.",
    f"lower `{flag('tree', 'steps')}`, or `num_speculative_tokens` beside `nodes`",
)
def _depth(tree: TreeConfig, vllm_config: Any) -> Iterator[Found]:
    speculative = vllm_config.speculative_config
    if not is_block(tree, speculative):
        return
    # With `nodes`, num_speculative_tokens is the depth until they are counted.
    given = "steps" in tree.model_fields_set or tree.nodes is None
    steps = tree.steps if given else speculative.num_speculative_tokens
    depth = trained_depth(speculative)
    if depth is not None and steps > depth:
        key = flag("tree", "steps") if given else "speculative_config.num_speculative_tokens"
        depth_is = f"{key} is" if given else f"{key}, the depth of a tree, is"
        yield Found(
            f"{depth_is} {steps}, but a block of the draft predicts {depth} tokens (block_size)",
            f"set {key} to {depth} or less",
        )


@BLOCKS.row(
    "`topk` above the candidates of a DFlash 2, LiLiCorr or XPress draft",
    "A position has no more tokens to choose from.",
    f"lower `{flag('tree', 'topk')}`",
)
def _candidates(tree: TreeConfig, vllm_config: Any) -> Iterator[Found]:
    speculative = vllm_config.speculative_config
    count, keys = num_candidates_of(speculative), " or ".join(CANDIDATE_KEYS)
    if is_refined(speculative):
        draft = getattr(speculative.draft_model_config, "hf_config", None)
        count, keys = refiner_sizes(draft).candidates, "xpress_topc"
    if count is not None and tree.topk > count and is_block(tree, speculative):
        key = flag("tree", "topk")
        yield Found(
            f"{key} is {tree.topk}, but the draft has {count} candidates per position ({keys})",
            f"set {key} to {count} or less",
        )


@BLOCKS.row(
    "`hot_tokens` as a number with block drafters",
    "They multiply by their output head once per step, so that learning pays nothing.",
    f"drop `{flag('tree', 'hot_tokens')}`, or give a file",
)
def _learned_tokens(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    hot = tree.hot_tokens
    if isinstance(hot, int) and is_block(tree, vllm_config.speculative_config):
        yield f"{flag('tree', 'hot_tokens')} is {hot}, and the draft is one of blocks"


@BLOCKS.row(
    "`hot_tokens` as a file with DFlash 2, LiLiCorr, XPress and DSpark",
    "These drafts score candidates by themselves.",
    f"drop `{flag('tree', 'hot_tokens')}`",
)
def _hot_file(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    speculative, hot = vllm_config.speculative_config, tree.hot_tokens
    scores_itself = (
        speculative.method == "dspark"
        or is_refined(speculative)
        or num_candidates_of(speculative) is not None
    )
    if isinstance(hot, str) and scores_itself and is_block(tree, speculative):
        method = speculative.method
        yield f"{flag('tree', 'hot_tokens')} is {hot!r}, for a draft of method {method!r}"


@BLOCKS.row(
    "`head_dtype: fp8` with DFlash 2 and LiLiCorr",
    "These drafts choose their candidates by their own output heads.",
    f"set `{flag('tree', 'head_dtype')}` to 'auto'",
)
def own_scores(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    """Find drafts whose own output heads can't be in FP8."""
    speculative = vllm_config.speculative_config
    own = num_candidates_of(speculative)
    if tree.head_dtype == "fp8" and own is not None and is_block(tree, speculative):
        yield f"{flag('tree', 'head_dtype')} is 'fp8', for a draft with {own} candidates of its own"


@BLOCKS.row(
    "`graph_runner` with block drafters",
    "vLLM's own graphs of a block hold the tree as well.",
    f"drop `{flag('tree', 'graph_runner')}`",
)
def _graph_runner(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    default = TreeConfig.model_fields["graph_runner"].default
    if tree.graph_runner != default and is_block(tree, vllm_config.speculative_config):
        yield f"{flag('tree', 'graph_runner')} is {tree.graph_runner!r}"


@BLOCKS.row(
    "more rows of a block (`max_num_seqs` times its positions) than `max_num_batched_tokens`",
    BUFFERS,
    "raise `--max-num-batched-tokens`, or lower one of the others",
)
def _rows(tree: TreeConfig, vllm_config: Any) -> Iterator[Found]:
    speculative = vllm_config.speculative_config
    if is_block(tree, speculative):
        width = block_rows(tree, speculative)
        yield from too_many_rows(
            "The pass of the draft", width, f"{width} positions", vllm_config.scheduler_config
        )
