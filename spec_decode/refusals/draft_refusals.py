"""Drafts without trees, and keys that some drafters don't have, refused in the frontend."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vllm_graft.base.options import flag
from vllm_graft.base.refusal import Found, Refusals
from vllm_graft.spec_decode.config.draft_config import NAME as CHAINS
from vllm_graft.spec_decode.config.draft_config import DraftConfig
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.models.drafts import (
    CANDIDATE_KEYS,
    block_rows,
    drafter_of,
    has_model,
    is_assistant,
    is_block,
    is_refined,
    methods,
    num_candidates_of,
    refiner_sizes,
    trained_depth,
)
from vllm_graft.spec_decode.refusals.engine_refusals import BUFFERS, too_many_rows
from vllm_graft.spec_decode.targets.dense.dense_features import chunks_of
from vllm_graft.spec_decode.targets.latent.latent_features import sparse_in

_ONE_MODULE = "MTPSpeculator"
"""The class that vLLM builds for MTP with a single module."""

_CHAIN = f"drop `{flag('tree')}` for vLLM's own chain"
_METHOD = "speculative_config.method"

DRAFTS = Refusals()


@DRAFTS.row(
    "methods that no drafter grows trees for",
    "Each kind of draft model needs a drafter.",
    f"set `{_METHOD}` to 'eagle', 'eagle3', 'mtp', 'dflash', 'dspark', 'draft_model' or 'ngram'",
)
def _method(tree: TreeConfig, vllm_config: Any) -> Iterator[Found]:
    if found := other_method(vllm_config.speculative_config, methods()):
        yield found


def other_method(speculative: Any, known: Sequence[str]) -> Found | None:
    """The method of vLLM's speculative config, if it is none of some."""
    if speculative.method in known:
        return None
    return Found(f"{_METHOD} is {speculative.method!r}", f"set {_METHOD} to {either(known)}")


def either(names: Sequence[str]) -> str:
    """Quoted names, the last after "or"."""
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}" if others else last


@DRAFTS.row(
    "`drafter: mtp` with Gemma 4's assistants",
    "It drafts with a module that has K/V, and these have none.",
    f"drop `{flag('tree', 'drafter')}`",
)
def _drafter(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    speculative = vllm_config.speculative_config
    if _needs_one_module(tree, speculative) and is_assistant(speculative.draft_model_config):
        yield f"{flag('tree', 'drafter')} is {tree.drafter!r}, and the draft is an assistant"


@DRAFTS.row(
    "MTP with several modules",
    "A module for one depth has not seen a tree's earlier depths.",
    _CHAIN,
)
def _modules(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    """MTP for which vLLM's ``init_speculator``, which asks of the number of nodes, builds another
    class than the one that our drafter extends."""
    speculative = vllm_config.speculative_config
    draft = getattr(speculative.draft_model_config, "hf_config", None)
    if draft is None or not _needs_one_module(tree, speculative):
        return
    modules = getattr(draft, "num_nextn_predict_layers", None) or 1
    if min(modules, tree.nodes or speculative.num_speculative_tokens) > 1:
        yield (
            f"The draft has {modules} MTP modules (num_nextn_predict_layers), one for each depth"
        )


def _needs_one_module(tree: TreeConfig, speculative: Any) -> bool:
    """Whether the drafter for MTP is one for a single module; third parties may bring others."""
    if speculative.method != "mtp":
        return False
    entry = drafter_of(tree, speculative)
    return entry is not None and entry.speculator.rpartition(":")[2] == _ONE_MODULE


@DRAFTS.row(
    "`hot_tokens`, and `head_dtype: fp8`, with the assistants of small Gemmas 4",
    "These assistants compute logits of the tokens near a state alone (use_ordered_embeddings).",
    "drop the key",
)
def _some_logits(tree: TreeConfig, vllm_config: Any) -> Iterator[Found]:
    draft = getattr(vllm_config.speculative_config.draft_model_config, "hf_config", None)
    if getattr(draft, "use_ordered_embeddings", False):
        yield from _head_keys(tree, ", and the draft is such an assistant")


def _head_keys(tree: TreeConfig, why: str) -> Iterator[Found]:
    """Keys of an output head that are given."""
    for key, value in (("hot_tokens", tree.hot_tokens), ("head_dtype", tree.head_dtype)):
        if value not in (None, "auto"):
            name = flag("tree", key)
            yield Found(f"{name} is {value!r}{why}", f"drop {name}")


@DRAFTS.row(
    "drafts with sparse attention (DeepSeek V3.2's module, and others with an indexer)",
    "An indexer picks the keys of a row among those of the cache, where a tree's are not.",
    _CHAIN,
)
def _sparse(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    # A chain (topk 1) is drafted by the same passes as a tree.
    yield from _of_draft(tree, vllm_config, sparse_in)


def _of_draft(
    tree: TreeConfig, vllm_config: Any, says_of: Callable[[Any], str | None]
) -> Iterator[str]:
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config
    has_text = getattr(draft, "hf_text_config", None) is not None
    if has_text and has_model(tree, speculative) and (says := says_of(draft)):
        yield f"The draft {says}"


@DRAFTS.row(
    "block drafts (DFlash, DSpark) with MLA attention",
    "Nobody has tried trees of such drafts.",
    f"use another draft, or {_CHAIN}",
)
def _latent_block(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    speculative = vllm_config.speculative_config
    latent = getattr(speculative.draft_model_config, "use_mla", False)
    if latent and is_block(tree, speculative):
        yield f"The draft uses MLA attention, and {_METHOD} is {speculative.method!r}"


@DRAFTS.row(
    "`method: draft_model` with MLA attention",
    "vLLM's own speculator fails in the first pass of such draft models, for chains too.",
    "use another draft",
)
def _latent_model(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    # `_prefill` plans a row more per request than it says that the request has tokens.
    speculative = vllm_config.speculative_config
    latent = getattr(speculative.draft_model_config, "use_mla", False)
    if latent and speculative.method == "draft_model" and not is_block(tree, speculative):
        yield f"The draft uses MLA attention, and {_METHOD} is 'draft_model'"


@DRAFTS.row(
    "drafts with chunked attention",
    "Rows of a level would have to know the chunks of the prefix and of the tree.",
    f"use another draft, or {_CHAIN}",
)
def _chunks(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    if not is_block(tree, vllm_config.speculative_config):
        yield from _of_draft(tree, vllm_config, chunks_of)


_WINDOWED = ("eagle", "eagle3", "mtp")
"""Methods whose drafts may see a window of the text."""


@DRAFTS.row(
    "`draft_window` with MLA drafts, assistants, drafts that have a sliding window, and methods "
    "other than `eagle`, `eagle3` and `mtp`",
    "It is a window over pages of K and V of whole texts, which these drafts don't have, or nobody "
    "has tried.",
    f"drop `{flag('tree', 'draft_window')}`",
)
def _windows(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    if tree.draft_window is None:
        return
    speculative = vllm_config.speculative_config
    draft, has = speculative.draft_model_config, ""
    if speculative.method not in _WINDOWED:
        has = f"{_METHOD} is {speculative.method!r}"
    elif getattr(draft, "use_mla", False):
        has = "the draft uses MLA attention"
    elif is_assistant(draft):
        has = "the draft reads the target's K/V"
    elif window := _own_window(draft):
        has = f"layers of the draft have a sliding window of {window} already"
    if has:
        yield f"{flag('tree', 'draft_window')} is {tree.draft_window}, but {has}"


def _own_window(draft: Any) -> int:
    """The sliding window of a draft's configuration, if some of its layers have one; else 0."""
    text = getattr(draft, "hf_text_config", None)
    kinds = getattr(text, "layer_types", None)
    if getattr(text, "use_sliding_window", True) is False:
        return 0
    if kinds and "sliding_attention" not in kinds:
        return 0
    return getattr(text, "sliding_window", None) or 0


@DRAFTS.row(
    "`graft.draft` beside `graft.tree`",
    "Graphs of a draft model are of its chain, and trees are none.",
    f"drop `{flag(CHAINS)}` or `{flag('tree')}`",
)
def _loops(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    if DraftConfig.from_vllm(vllm_config) is not None:
        yield f"{flag(CHAINS)} is given beside {flag('tree')}"


@DRAFTS.row(
    "`method: draft_model` with data parallelism",
    "Ranks don't agree on the rows of the draft's first pass.",
    f"set `--data-parallel-size` to 1, or {_CHAIN}",
)
def _replicas(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    if vllm_config.speculative_config.method != "draft_model":
        return
    if (replicas := vllm_config.parallel_config.data_parallel_size) > 1:
        yield f"--data-parallel-size is {replicas}, and {_METHOD} is 'draft_model'"


@DRAFTS.row(
    "parallel drafting with drafters of levels",
    "It drafts a whole chain at once.",
    "set `speculative_config.parallel_drafting` to false",
)
def _parallel(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    speculative = vllm_config.speculative_config
    if speculative.parallel_drafting and not is_block(tree, speculative):
        yield "speculative_config.parallel_drafting is true"


@DRAFTS.row(
    "trees deeper than a block drafter's block",
    "A position behind the block was never trained.",
    f"lower `{flag('tree', 'steps')}`, or `num_speculative_tokens` beside `nodes`",
)
def _depth(tree: TreeConfig, vllm_config: Any) -> Iterator[Found]:
    speculative = vllm_config.speculative_config
    if not is_block(tree, speculative):
        return
    (given, steps), depth = _steps(tree, speculative), trained_depth(speculative)
    if depth is not None and steps > depth:
        key = flag("tree", "steps") if given else "speculative_config.num_speculative_tokens"
        depth_is = f"{key} is" if given else f"{key}, the depth of a tree, is"
        yield Found(
            f"{depth_is} {steps}, but a block of the draft predicts {depth} tokens (block_size)",
            f"set {key} to {depth} or less",
        )


@DRAFTS.row(
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


@DRAFTS.row(
    "`hot_tokens` as a number with block drafters",
    "They multiply by their output head once per step, so that learning pays nothing.",
    f"drop `{flag('tree', 'hot_tokens')}`, or give a file",
)
def _learned_tokens(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    hot = tree.hot_tokens
    if isinstance(hot, int) and is_block(tree, vllm_config.speculative_config):
        yield f"{flag('tree', 'hot_tokens')} is {hot}, and the draft is one of blocks"


@DRAFTS.row(
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


@DRAFTS.row(
    "`head_dtype: fp8` with DFlash 2 and LiLiCorr",
    "These drafts choose their candidates by their own output heads.",
    f"set `{flag('tree', 'head_dtype')}` to 'auto'",
)
def own_scores(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    """Drafts whose own output heads can't be in FP8."""
    speculative = vllm_config.speculative_config
    own = num_candidates_of(speculative)
    if tree.head_dtype == "fp8" and own is not None and is_block(tree, speculative):
        yield f"{flag('tree', 'head_dtype')} is 'fp8', for a draft with {own} candidates of its own"


@DRAFTS.row(
    "`graph_runner` with block drafters",
    "vLLM's own graphs of a block hold the tree as well.",
    f"drop `{flag('tree', 'graph_runner')}`",
)
def _graph_runner(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    default = TreeConfig.model_fields["graph_runner"].default
    if tree.graph_runner != default and is_block(tree, vllm_config.speculative_config):
        yield f"{flag('tree', 'graph_runner')} is {tree.graph_runner!r}"


@DRAFTS.row(
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


@DRAFTS.row(
    "`hot_tokens` or `head_dtype: fp8` with `method: ngram`",
    "N-grams have no output head.",
    "drop the key",
)
def _head(tree: TreeConfig, vllm_config: Any) -> Iterator[Found]:
    if not has_model(tree, vllm_config.speculative_config):
        yield from _head_keys(tree, " without a draft model")


@DRAFTS.row(
    "`method: ngram` with more nodes than `topk` matches of `steps` tokens have",
    "Nothing could fill the tree.",
    f"ask for fewer nodes, raise `{flag('tree', 'topk')}`, or ask for a deeper tree",
)
def _filled(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    speculative = vllm_config.speculative_config
    nodes, (_, steps) = tree.nodes or speculative.num_speculative_tokens, _steps(tree, speculative)
    if nodes > (most := tree.topk * steps) and not has_model(tree, speculative):
        yield (
            f"{flag('tree', 'topk')} is {tree.topk}, and the depth {steps}, so that matches have "
            f"{most} tokens for {nodes} nodes"
        )


def _steps(tree: TreeConfig, speculative: Any) -> tuple[bool, int]:
    """Whether ``steps`` says how deep a tree is, and how deep it is. With ``nodes``,
    ``num_speculative_tokens`` is the depth until they are counted."""
    given = "steps" in tree.model_fields_set or tree.nodes is None
    return given, tree.steps if given else speculative.num_speculative_tokens
