"""Trees that ``graft: auto`` and the other presets ask for. The user gives the depth, as
``num_speculative_tokens``, and the rest is filled in here. Limits that the user gave to vLLM are
never raised. VLLM has already derived the encoder's budget from ``max_num_batched_tokens``, so a
tree whose levels do not fit is made narrower."""

import copy
from dataclasses import dataclass, replace
from typing import Any, Literal

from vllm_graft.base.decision import Preset
from vllm_graft.base.log import warning_once
from vllm_graft.base.options import flag, target_of
from vllm_graft.base.part import Offer
from vllm_graft.base.refusal import facts, sentences
from vllm_graft.base.values import human
from vllm_graft.spec_decode.config.tree_config import NAME, NgramConfig, TreeConfig, lengths_of
from vllm_graft.spec_decode.models.drafts import (
    draft_vocabulary,
    drafter_of,
    grows_by_levels,
    has_model,
    methods,
    num_candidates_of,
    step_has_experts,
)
from vllm_graft.spec_decode.presets.known_drafts import no_draft
from vllm_graft.spec_decode.presets.node_count import wrong_depth
from vllm_graft.spec_decode.refusals.draft_refusals import either, other_method
from vllm_graft.spec_decode.refusals.engine_refusals import level_problems, shape_problems
from vllm_graft.spec_decode.refusals.fit_refusals import DRIFTS, require_fit
from vllm_graft.spec_decode.refusals.tree_refusals import LATE, refusals
from vllm_graft.spec_decode.refusals.verification_refusals import head_problems
from vllm_graft.spec_decode.targets.recurrent.recurrent_features import (
    StateRoom,
    has_delta_rule,
    state_room,
)
from vllm_graft.spec_decode.trees.text_state import MemoryState
from vllm_graft.spec_decode.trees.tree import num_candidates


@dataclass(frozen=True)
class _Size:
    topk: int
    nodes: int
    shape: Literal["fixed", "auto"]


# The figures are from docs/performance.md. With one request, up to 63 nodes are fastest, hence 63
# for `auto`, and for `latency` at every batch size. With 16 to 64 requests trees gain little, and
# `shape: auto` begins with at most 15 nodes and 4 children (tuning/shapes.py): a level then has 4
# rows per request, so that CUDA graphs of vLLM's default 512 rows hold 128 requests, not 64.
_SIZES: dict[str, _Size] = {
    "auto": _Size(8, 63, "auto"),
    "latency": _Size(8, 63, "fixed"),
    "throughput": _Size(4, 15, "auto"),
}

_UNTUNED = _Size(4, 15, "fixed")
"""The size for engines that refuse ``shape: auto``: not too large for many requests."""

_WHOLE_DRAFT: dict[str, _Size] = {
    "auto": _SIZES["throughput"],
    "latency": _UNTUNED,
    "throughput": _SIZES["throughput"],
}
"""Sizes for a draft that is a model of its own, with which such trees were measured. A level takes
a pass of the whole draft, and more nodes are of deeper levels or less likely."""

_RECURRENT_TOPK = 4
"""Children on the gated delta rule, with which trees of an MTP module were measured."""

HOT_SIZE = 49_152
"""Hot tokens. Learned lists of so many hold 98 to 99 % of chat answers."""

_LARGE_VOCABULARY = 2 * HOT_SIZE
"""A draft vocabulary from which on a level reads clearly less without the rest."""

_STATES = "The target has recurrent layers with the gated delta rule, on which trees were"

_UNMEASURED = f" Nobody measured yet how fast its trees are: ask for {flag(NAME)} by name."

_SEAMS = {
    "mtp": "mtp", "dflash": "block", "dspark": "block", "ngram": "ngram", "ngram_gpu": "ngram",
}  # fmt: skip
"""Rooms of the ledger that drafters rely on beside that of all trees, by method."""

_OWN_TABLE = (
    "speculative_config.num_speculative_tokens_per_batch_size counts drafts of a chain: drop it, "
    f"or ask for {flag(NAME)} by name, where it counts nodes."
)


def offer(preset: Preset, vllm_config: Any) -> Offer | str:
    """A preset's tree, or why there is none; a ConfigError if stock vLLM would stop with it."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return _without_draft(preset, vllm_config)
    require_fit(vllm_config)
    if other := " ".join(sentences(DRIFTS, TreeConfig(), vllm_config)):
        warning_once(other)
        return other
    if speculative.num_speculative_tokens_per_batch_size is not None:
        return _OWN_TABLE
    if unknown := other_method(speculative, methods(measured=True)):
        why = f"{unknown.text}, and a preset has trees for {either(methods(measured=True))}."
        return why + (_UNMEASURED if speculative.method in methods() else "")
    drafter = drafter_of(TreeConfig(), speculative)
    if drafter is not None and drafter.unmeasured:
        return f"The drafter for this draft is {drafter.name}.{_UNMEASURED}"
    depth = speculative.num_speculative_tokens
    if problem := wrong_depth(depth):
        return problem
    alone = not has_model(TreeConfig(), speculative)
    whole = speculative.method == "draft_model"
    size, notes = (_WHOLE_DRAFT if whole else _SIZES)[preset], list[str]()
    if size.shape == "auto" and (reasons := shape_problems(vllm_config)):
        size, notes = _UNTUNED, reasons
    room = state_room(vllm_config) if has_delta_rule(target_of(vllm_config)) else None
    if room is not None:
        size, notes = _with_states(size, notes, room)
    fitted = (
        ngrams_alone(preset, vllm_config) if alone else _fitted(size, depth, notes, vllm_config)
    )
    if isinstance(fitted, str) or any(sentences(refusals(), fitted.section, vllm_config)):
        return fitted
    if room is not None and (why := _slower_or_unmeasured(vllm_config, room)):
        return why
    if late := facts(sentences(LATE, fitted.section, vllm_config)):
        return late
    return fitted


def _without_draft(preset: Preset, vllm_config: Any) -> Offer | str:
    """Trees of n-grams, which need no draft, with the speculative config that vLLM lacks."""
    given = copy.copy(vllm_config)
    drafts = given.speculative_config = ngram_drafts(vllm_config)
    found = drafts if isinstance(drafts, str) else offer(preset, given)
    if isinstance(found, Offer):
        refused = facts(sentences(refusals(), found.section, given))
        found = refused or replace(found, speculative=drafts)
    hint = no_draft(vllm_config)
    if isinstance(found, str):
        return f"{hint} Trees of n-grams, which need none, are off: {found}"
    return replace(found, says=f"{found.says}. {hint}")


def _slower_or_unmeasured(vllm_config: Any, room: StateRoom) -> str:
    """Why a target with the gated delta rule is left to vLLM; empty if it is not."""
    by_name, method = f"ask for {flag(NAME)} by name.", vllm_config.speculative_config.method
    if method != "mtp":
        return (
            f"{_STATES} measured with method 'mtp' alone, and speculative_config.method is "
            f"{method!r}: set it to 'mtp', or {by_name}"
        )
    if step_has_experts(TreeConfig(), vllm_config):
        return f"{_STATES} not always faster than chains where there are experts: {by_name}"
    if heads := head_problems(vllm_config):
        return (
            f"{_STATES} faster than chains with the draft's output head in FP8 alone: {by_name} "
            f"{facts(heads)}"
        )
    return "" if room.fits else f"{room.says} Or {by_name}"


def _with_states(size: _Size, notes: list[str], room: StateRoom) -> tuple[_Size, list[str]]:
    """A size for a target of which vLLM holds a state for each node and request."""
    few = replace(size, topk=min(size.topk, _RECURRENT_TOPK), nodes=min(size.nodes, room.nodes))
    return few, notes if few == size else [*notes, room.says]


def _fitted(size: _Size, depth: int, notes: list[str], vllm_config: Any) -> Offer | str:
    """The tree of a size within what the user gave to vLLM."""
    scheduler = vllm_config.scheduler_config
    rows = scheduler.max_num_batched_tokens // scheduler.max_num_seqs
    candidates = num_candidates_of(vllm_config.speculative_config)
    wanted = min(size.topk, candidates or size.topk)
    narrow = level_problems(TreeConfig(topk=wanted), vllm_config)
    topk = min(wanted, rows)
    if topk < 2:
        return facts(narrow)
    nodes = min(size.nodes, num_candidates(topk, depth))
    if getattr(vllm_config, "lora_config", None) is not None and nodes > rows - 1:
        nodes = max(1, rows - 1)
        notes = [
            *notes,
            f"With --enable-lora a step has {rows} rows for each request, of which a tree's root "
            f"takes one (--max-num-batched-tokens {scheduler.max_num_batched_tokens} for "
            f"--max-num-seqs {scheduler.max_num_seqs}).",
        ]
    threshold = scheduler.long_prefill_token_threshold
    if size.shape == "fixed" and 0 < threshold <= nodes:
        # A fixed tree of more rows is refused; one of a root alone would be no tree.
        nodes = max(1, threshold - 1)
        notes = [*notes, f"--long-prefill-token-threshold is {threshold}."]
    if vllm_config.speculative_config.method == "draft_model":
        # Such drafts were measured without the rest.
        tree = TreeConfig(topk=topk, steps=depth, nodes=nodes, shape=size.shape)
        return Offer(tree, _told(tree, [*notes, *narrow]))
    heads = head_problems(vllm_config)
    head: Literal["auto", "fp8"] = "auto" if heads else "fp8"
    tree = TreeConfig(topk=topk, steps=depth, nodes=nodes, shape=size.shape, head_dtype=head)
    if (hot := hot_size(vllm_config)) is not None:
        tree = tree.model_copy(update={"hot_tokens": hot})
    # Nobody measured n-grams on the gated delta rule.
    delta = has_delta_rule(target_of(vllm_config))
    ngrams = "" if delta else ngram_room(vllm_config)
    if isinstance(ngrams, NgramConfig):
        tree = tree.model_copy(update={"ngram": ngrams})
    elif ngrams:
        notes = [*notes, ngrams]
    return Offer(tree, _told(tree, [*notes, *narrow, *heads]))


def rooms(vllm_config: Any) -> tuple[str, ...]:
    """Rooms of the ledger that trees need with a draft on a target."""
    own = _SEAMS.get(vllm_config.speculative_config.method)
    found = ["core", NAME, *([own] if own else [])]
    return (*found, "recurrent") if has_delta_rule(target_of(vllm_config)) else tuple(found)


def hot_size(vllm_config: Any) -> int | None:
    """The number of hot tokens for a draft whose levels read a large output head, else None."""
    speculative = vllm_config.speculative_config
    if not grows_by_levels(TreeConfig(), speculative):
        return None
    return HOT_SIZE if draft_vocabulary(vllm_config) >= _LARGE_VOCABULARY else None


def _told(tree: TreeConfig, notes: list[str]) -> str:
    most = "up to " if tree.shape == "auto" else ""
    values = (
        f"trees of {most}{tree.nodes} nodes: topk {tree.topk}, steps {tree.steps} (from "
        f"num_speculative_tokens), shape {tree.shape}, head_dtype {tree.head_dtype}"
    )
    if tree.hot_tokens is not None:
        values += f", hot_tokens {tree.hot_tokens}"
    if tree.ngram is not None:
        values += ", ngram true"
    return f"{values}. The preset wants more, but: {facts(notes)}" if notes else values


DEPTH, MATCHES = 31, 4
"""Tokens that are copied from a match at most, and matches of a text. Levels take no pass, so that
a tree is as deep as the longest chain that copies pay for."""

ALONE_MIN = 1
"""Tokens of a match at least. Raised, fewer steps have drafts; how often a match of each length
goes on as it did before is learned, so that short ones do no harm."""

_NODES: dict[str, int] = {"auto": 63, "latency": 63, "throughput": 15}

NGRAM_SHARE, ALONE_SHARE = 0.01, 0.02
"""Most of a device's memory that copies of the texts may take, beside a draft and alone, where vLLM
has a copy of its own. K/V of the same tokens take a thousand times as much, but vLLM keeps those of
fewer tokens than requests may have. Alone it is enough for vLLM's 1,024 requests of 131,072 tokens
on 80 GiB."""


def ngram_drafts(vllm_config: Any) -> Any | str:
    """vLLM's own config of n-grams as drafts for a target without a draft, or why there is none."""
    from vllm.config import SpeculativeConfig

    model = vllm_config.model_config
    if model is None or getattr(model, "runner_type", "generate") != "generate":
        return "The model generates no text."
    if getattr(model, "is_diffusion", False):
        return "The model generates its text by diffusion."
    if has_delta_rule(model):
        return "Nobody measured them on recurrent layers, of which each node costs a state."
    lengths = NgramConfig(min=ALONE_MIN)
    try:
        return SpeculativeConfig(
            method="ngram_gpu",
            num_speculative_tokens=DEPTH,
            prompt_lookup_min=lengths.min,
            prompt_lookup_max=lengths.max,
            target_model_config=model,
            target_parallel_config=vllm_config.parallel_config,
        )
    except ValueError as refused:
        return f"vLLM refuses their configuration: {refused}"


def ngrams_alone(preset: Preset, vllm_config: Any) -> Offer | str:
    """Trees of n-grams alone for the speculative config that is there, or why there are none. The
    number of nodes is always chosen while serving: most texts repeat too little for any."""
    if reasons := shape_problems(vllm_config):
        return facts(reasons)
    scheduler, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
    if (requests := scheduler.max_num_seqs) < 2:
        return (
            f"--max-num-seqs is {requests}, and a table of drafts by batch size with no drafts in "
            "it, for texts that don't repeat, needs 2."
        )
    if why := _no_room(text_bytes_alone(vllm_config), ALONE_SHARE, vllm_config):
        return why
    depth = speculative.num_speculative_tokens
    nodes = min(_NODES[preset], MATCHES * depth)
    if getattr(vllm_config, "lora_config", None) is not None:
        nodes = max(1, min(nodes, scheduler.max_num_batched_tokens // requests - 1))
    tree = TreeConfig(topk=MATCHES, steps=depth, nodes=nodes, shape="auto")
    says = (
        f"trees of up to {nodes} nodes of n-grams, and none where they don't pay: topk {MATCHES}, "
        f"steps {depth}, shape auto, prompt_lookup_min {speculative.prompt_lookup_min}, "
        f"prompt_lookup_max {speculative.prompt_lookup_max}"
    )
    return Offer(tree, says)


def ngram_room(vllm_config: Any) -> NgramConfig | str:
    """The n-grams of a preset's trees, or why there is no room for them: empty for drafts that do
    not grow by levels, beside which nobody measured them. No model is loaded yet."""
    if not grows_by_levels(TreeConfig(), vllm_config.speculative_config):
        return ""
    ngram = NgramConfig()
    return _no_room(text_bytes(ngram, vllm_config), NGRAM_SHARE, vllm_config) or ngram


def _no_room(taken: int, share: float, vllm_config: Any) -> str:
    """Why copies of the texts of so many bytes have no room; empty if they have."""
    from vllm.platforms import current_platform

    memory = current_platform.get_device_total_memory()
    if taken <= share * memory:
        return ""
    return (
        f"Copies of the texts in which n-grams are looked for would take {human(taken)} with "
        f"--max-num-seqs {vllm_config.scheduler_config.max_num_seqs} and --max-model-len "
        f"{vllm_config.model_config.max_model_len}, more than {share:.0%} of the device's "
        f"{human(memory)}: lower one of the two."
    )


def text_bytes(
    ngram: NgramConfig, vllm_config: Any, *, matches: int = 1, memory: MemoryState | None = None
) -> int:
    """Device bytes on each rank of the requests' texts and of what is learned from them, with so
    many matches of each text, beside a memory or without one."""
    import torch

    from vllm_graft.spec_decode.trees.text_state import NgramState

    width = vllm_config.model_config.max_model_len
    return NgramState.allocate(
        ngram.min,
        ngram.max,
        vllm_config.scheduler_config.max_num_seqs,
        width,
        torch.device("meta"),
        matches=matches,
        reference=ngram.room(width),
        memory=memory,
    ).num_bytes


def text_bytes_alone(vllm_config: Any) -> int:
    """The same for n-grams alone, for which vLLM has its own copy of the texts on the device."""
    ngram = lengths_of(TreeConfig(), vllm_config.speculative_config)
    tokens: int = vllm_config.scheduler_config.max_num_seqs * vllm_config.model_config.max_model_len
    return text_bytes(ngram, vllm_config, matches=MATCHES) + 4 * tokens
