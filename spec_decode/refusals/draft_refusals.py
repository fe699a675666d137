"""The drafts that no tree grows from, refused in the frontend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from vllm_graft.base.options import flag
from vllm_graft.base.refusal import Refusal
from vllm_graft.spec_decode.config.draft_config import NAME as CHAINS
from vllm_graft.spec_decode.config.draft_config import DraftConfig
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.models.chosen import drafter_of, has_model, is_block, methods
from vllm_graft.spec_decode.models.draft_facts import is_assistant
from vllm_graft.spec_decode.targets.dense.dense_features import chunks_of
from vllm_graft.spec_decode.targets.latent.latent_features import sparse_in

_ONE_MODULE = "MTPSpeculator"
"""The class that vLLM builds for MTP with a single module."""

_CHAIN = "drop `graft.tree` for vLLM's own chain"


def _method(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    yield from other_method(vllm_config.speculative_config, methods())


def other_method(speculative: Any, known: Sequence[str]) -> Iterator[str]:
    """A sentence if the method of vLLM's speculative config is none of some."""
    if speculative.method not in known:
        *others, last = map(repr, known)
        allowed = f"{', '.join(others)} or {last}" if others else last
        yield f"speculative_config.method is {speculative.method!r}: set it to {allowed}."


def _modules(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    """Kinds of MTP for which vLLM builds another class than the one that our drafter extends.

    The cases are those of its ``init_speculator``, which asks them of the number of nodes.
    """
    speculative = vllm_config.speculative_config
    draft = getattr(speculative.draft_model_config, "hf_config", None)
    if speculative.method != "mtp" or draft is None or not _needs_one_module(tree, speculative):
        return
    if is_assistant(speculative.draft_model_config):
        yield (
            f"{flag('tree', 'drafter')} is {tree.drafter!r}, which drafts with a module that has "
            "K/V. Gemma 4's assistant has none: drop the key."
        )
        return
    modules = getattr(draft, "num_nextn_predict_layers", None) or 1
    if min(modules, tree.nodes or speculative.num_speculative_tokens) > 1:
        yield (
            f"The draft has {modules} MTP modules (num_nextn_predict_layers), one for each depth: "
            f"drop {flag('tree')} for vLLM's own chain."
        )


def _needs_one_module(tree: TreeConfig, speculative: Any) -> bool:
    """Whether the drafter for MTP is one for a single module; third parties may bring others."""
    entry = drafter_of(tree, speculative)
    return entry is not None and entry.speculator.rpartition(":")[2] == _ONE_MODULE


def _some_logits(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    draft = vllm_config.speculative_config.draft_model_config
    if not getattr(getattr(draft, "hf_config", None), "use_ordered_embeddings", False):
        return
    refused = []
    if tree.hot_tokens is not None:
        refused.append(("hot_tokens", repr(tree.hot_tokens), "drop the key"))
    if tree.head_dtype == "fp8":
        refused.append(("head_dtype", "'fp8'", "set it to 'auto'"))
    for key, value, instead in refused:
        yield (
            f"{flag('tree', key)} is {value}, but this assistant computes logits of the tokens "
            f"near a state alone (use_ordered_embeddings): {instead}."
        )


def _sparse(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    # A chain (topk 1) is drafted by the same passes as a tree.
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config
    if getattr(draft, "hf_text_config", None) is None or not has_model(tree, speculative):
        return
    if says := sparse_in(draft):
        yield (
            f"The draft {says}, and those of a tree's levels are not in its cache: drop "
            f"{flag('tree')} for vLLM's own chain."
        )


def _latent(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    speculative = vllm_config.speculative_config
    if not getattr(speculative.draft_model_config, "use_mla", False):
        return
    if is_block(tree, speculative):
        yield (
            f"The draft uses MLA attention, which trees of method {speculative.method!r} were not "
            f"made for: drop {flag('tree')} for vLLM's own chain."
        )
    elif speculative.method == "draft_model":
        # `_prefill` plans a row more per request than it says that the request has tokens.
        yield (
            "The draft model uses MLA attention, in whose first pass vLLM's own speculator fails, "
            "for chains too: use another draft."
        )


def _chunks(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config
    if getattr(draft, "hf_text_config", None) is None or is_block(tree, speculative):
        return
    if not has_model(tree, speculative):
        return
    if says := chunks_of(draft):
        yield (
            f"The draft {says}, and no level of a tree can be drafted on these: use another draft, "
            f"or drop {flag('tree')} for vLLM's own chain."
        )


def _loops(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    if DraftConfig.from_vllm(vllm_config) is not None:
        yield (
            f"{flag(CHAINS)} makes graphs of a draft model's chain, and {flag('tree')} drafts "
            "trees: drop one of them."
        )


def _replicas(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    if vllm_config.speculative_config.method != "draft_model":
        return
    if (replicas := vllm_config.parallel_config.data_parallel_size) > 1:
        yield (
            f"data_parallel_size is {replicas}, which trees of method 'draft_model' were not made "
            f"for: set it to 1, or drop {flag('tree')} for vLLM's own chain."
        )


_WINDOWED = ("eagle", "eagle3", "mtp")
"""Methods whose drafts may see a window of the text."""


def _windows(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    if tree.draft_window is None:
        return
    speculative = vllm_config.speculative_config
    draft, key = speculative.draft_model_config, flag("tree", "draft_window")
    if speculative.method not in _WINDOWED:
        *others, last = map(repr, _WINDOWED)
        yield (
            f"{key} is {tree.draft_window}, but speculative_config.method is "
            f"{speculative.method!r}, and only drafts of {', '.join(others)} and {last} may see a "
            "window: drop the key."
        )
    elif getattr(draft, "use_mla", False):
        yield f"{key} is {tree.draft_window}, but the draft uses MLA attention: drop the key."
    elif is_assistant(draft):
        yield f"{key} is {tree.draft_window}, but the draft reads the target's K/V: drop the key."
    elif window := _own_window(draft):
        yield (
            f"{key} is {tree.draft_window}, but layers of the draft have a sliding window of "
            f"{window} already: drop the key."
        )


def _own_window(draft: Any) -> int:
    """The sliding window of a draft's configuration, if some of its layers have one; else 0."""
    text = getattr(draft, "hf_text_config", None)
    kinds = getattr(text, "layer_types", None)
    if getattr(text, "use_sliding_window", True) is False:
        return 0
    if kinds and "sliding_attention" not in kinds:
        return 0
    return getattr(text, "sliding_window", None) or 0


DRAFTS: tuple[Refusal, ...] = (
    Refusal(
        "methods that no drafter grows trees for",
        "Each kind of draft model needs a drafter.",
        "set `method` to `eagle`, `eagle3`, `mtp`, `dflash`, `dspark`, `draft_model` or `ngram`",
        _method,
    ),
    Refusal(
        "MTP with several modules",
        "A module for one depth has not seen a tree's earlier depths.",
        _CHAIN,
        _modules,
    ),
    Refusal(
        "`hot_tokens`, and `head_dtype: fp8`, with the assistants of small Gemmas 4",
        "These assistants compute logits of the tokens near a state alone.",
        "drop the key",
        _some_logits,
    ),
    Refusal(
        "drafts with sparse attention (DeepSeek V3.2's module, and others with an indexer)",
        "An indexer picks the keys of a row among those of the cache, where a tree's are not.",
        _CHAIN,
        _sparse,
    ),
    Refusal(
        "block drafts (DFlash, DSpark) and `method: draft_model` with MLA attention",
        "Nobody has tried such block drafts; vLLM fails in the first pass of such draft models.",
        "use another draft; for a block draft, drop `graft.tree` for vLLM's own chain",
        _latent,
    ),
    Refusal(
        "drafts with chunked attention",
        "Rows of a level would have to know the chunks of the prefix and of the tree.",
        "use another draft, or drop `graft.tree` for vLLM's own chain",
        _chunks,
    ),
    Refusal(
        "`draft_window` with MLA drafts, drafts that have a sliding window, and methods other than "
        "`eagle`, `eagle3` and `mtp`",
        "It is a window over pages of K and V of whole texts, which these drafts don't have, or "
        "nobody has tried.",
        "drop the key",
        _windows,
    ),
    Refusal(
        "`graft.draft` beside `graft.tree`",
        "Its graphs are of a chain.",
        "drop one of them",
        _loops,
    ),
    Refusal(
        "`method: draft_model` with data parallelism",
        "Ranks don't agree on the rows of the draft's first pass.",
        _CHAIN,
        _replicas,
    ),
)
