"""The drafts that no tree grows from, refused in the frontend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from vllm_graft.base.options import flag
from vllm_graft.base.refusal import Found, Refusals
from vllm_graft.spec_decode.config.draft_config import NAME as CHAINS
from vllm_graft.spec_decode.config.draft_config import DraftConfig
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.models.chosen import drafter_of, has_model, is_block, methods
from vllm_graft.spec_decode.models.draft_facts import is_assistant
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
    """Kinds of MTP for which vLLM builds another class than the one that our drafter extends.

    The cases are those of its ``init_speculator``, which asks them of the number of nodes.
    """
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
    draft = vllm_config.speculative_config.draft_model_config
    if not getattr(getattr(draft, "hf_config", None), "use_ordered_embeddings", False):
        return
    asked = (("hot_tokens", tree.hot_tokens, None), ("head_dtype", tree.head_dtype, "auto"))
    for key, value, default in asked:
        if value != default:
            name = flag("tree", key)
            yield Found(f"{name} is {value!r}, and the draft is such an assistant", f"drop {name}")


@DRAFTS.row(
    "drafts with sparse attention (DeepSeek V3.2's module, and others with an indexer)",
    "An indexer picks the keys of a row among those of the cache, where a tree's are not.",
    _CHAIN,
)
def _sparse(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    # A chain (topk 1) is drafted by the same passes as a tree.
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config
    if getattr(draft, "hf_text_config", None) is None or not has_model(tree, speculative):
        return
    if says := sparse_in(draft):
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
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config
    if getattr(draft, "hf_text_config", None) is None or is_block(tree, speculative):
        return
    if has_model(tree, speculative) and (says := chunks_of(draft)):
        yield f"The draft {says}"


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
