"""Arms of ``vllm-graft bench trees``: their names, and the flags of `vllm serve` of each."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from vllm_graft.bench.common.arm import Arm
from vllm_graft.bench.common.report import BenchmarkError
from vllm_graft.bench.common.serve_flags import Serving, adding, bare
from vllm_graft.bench.common.told_lengths import FLAG, SCHEDULER

NAMES = (
    "none, graft, ngram:K, chain:K[,K...], sampled:K[,K...], block:K[,K...] or adaptive:K[,K...], "
    "alone or with more flags of vllm serve behind it in the same word"
)

CHAINS: dict[str, dict[str, Any]] = {
    "chain": {},
    "sampled": {"draft_sample_method": "probabilistic"},
    "block": {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"},
    "adaptive": {
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "block",
        "enable_adaptive_verification": True,
    },
}
"""Chains of stock vLLM, and the keys that they add to the speculative configuration."""

NGRAM = {"method": "ngram_gpu", "prompt_lookup_min": 1, "prompt_lookup_max": 8}
"""Stock vLLM's n-grams, which need no draft model and let it schedule asynchronously. Matches of
one token on give it the most tokens per step on prose."""

LENGTHS = (2, 3, 5, 7)
"""Lengths of stock's chains among which its best one is looked for."""

_SPECULATIVE = "--speculative-config"
_TOKENS, _BY_BATCH = "num_speculative_tokens", "num_speculative_tokens_per_batch_size"
_DRAFT = (_SPECULATIVE, "-sc", "--spec-method", "--spec-model", "--spec-tokens")


def is_chain(column: str) -> bool:
    """Whether a column is a chain of stock vLLM, which is told its length."""
    return column.partition(":")[0] in CHAINS


def read_arms(names: Sequence[str] | None, given: Serving, *, sampled: bool) -> list[Arm]:
    """The arms of names, or of stock's best and of ours, for the flags that were given.

    Args:
        names: each one of `NAMES`; None for all that these flags have.
        given: the flags with the preset, if they ask for no part of ours; `graft` keeps them.
        sampled: whether requests have a temperature; stock's best chain then samples its drafts.

    Raises:
        BenchmarkError: a name can't be read, or vLLM or a part of ours refuses its flags.
    """
    draft = _draft(given)
    if names is None:
        kind, lengths = "block" if sampled else "chain", ",".join(map(str, LENGTHS))
        beside = [f"{kind}:{lengths}", "ngram:5"] if draft else ["ngram:5", "ngram:15"]
        names = ["none", *beside, "graft"]
    return [arm for name in names for arm in _arms(name, given, draft)]


def _draft(given: Serving) -> dict[str, Any]:
    """The speculative configuration of the flags, without a length; empty without a model."""
    engine = given.request.engine
    found = dict(engine.speculative_config or {})
    if engine.spec_method:
        found = {"method": engine.spec_method, "model": engine.spec_model}
    if str(found.get("method", "")).startswith("ngram"):
        return {}
    return {key: value for key, value in found.items() if key not in (_TOKENS, _BY_BATCH)}


def _arms(name: str, given: Serving, draft: dict[str, Any]) -> Iterator[Arm]:
    first, *more = shlex.split(name) or [""]
    kind, _, counts = first.partition(":")
    numbers = [int(count) for count in counts.split(",") if count.isdigit()]
    known = ",".join(map(str, numbers)) == counts and len({0, *numbers}) == len(numbers) + 1
    label = f"--arms {name!r}"
    stock = [*bare(given, *_DRAFT), *more]
    if first == "none":
        served = Serving.read(stock, label)
        if served.config.speculative_config is not None:
            raise BenchmarkError(
                f"{label}: {given.model} names a draft itself: give its target as MODEL, and it "
                f"with {_SPECULATIVE}."
            )
        yield served.arm(name)
    elif first == "graft":
        ours = Serving.read([*given.arguments, *more], label, preset=True) if more else given
        if not ours.has("tree"):
            raise BenchmarkError(f"{label}: no tree would grow: {ours.why_not('tree')}")
        yield ours.arm(name)
    elif kind == "ngram" and known and len(numbers) == 1:
        drafts = {**NGRAM, _TOKENS: numbers[0]}
        yield Serving.read(adding(stock, _SPECULATIVE, drafts), label).arm(name)
    elif kind in CHAINS and known and numbers:
        if not draft:
            raise BenchmarkError(f"{label}: a chain needs a draft model: give {_SPECULATIVE}.")
        yield from _chains(name, numbers, stock, {**draft, **CHAINS[kind]}, given)
    else:
        raise BenchmarkError(f"{label}: say {NAMES}.")


def _chains(
    name: str, numbers: list[int], stock: list[str], draft: dict[str, Any], given: Serving
) -> Iterator[Arm]:
    """One engine that is told each length in turn, or where that is impossible one for each."""

    def flags(more: dict[str, Any]) -> list[str]:
        return adding(stock, _SPECULATIVE, draft | more)

    made, told = Arm(name, drafts=tuple(numbers)), f"--arms {name!r}"
    one = {column: flags({_TOKENS: count}) for column, count in made.columns.items()}
    scheduler = given.config.scheduler_config
    most = scheduler.max_num_seqs
    if len(numbers) == 1 or len(numbers) > most or scheduler.scheduler_cls is not None:
        yield from (Serving.read(each, told).arm(column) for column, each in one.items())
        return
    by_batch = {_TOKENS: max(numbers), _BY_BATCH: ranges(numbers, most)}
    arm = Serving.read([*flags(by_batch), FLAG, SCHEDULER], told).arm(name, made.drafts)
    commands = {column: shlex.join(["vllm", "serve", *each]) for column, each in one.items()}
    yield replace(arm, commands=commands)


def ranges(numbers: Sequence[int], max_num_seqs: int) -> list[list[int]]:
    """Give each number a batch size, longest chains first, so that vLLM captures them all."""
    found = [[place, place, count] for place, count in enumerate(sorted(numbers, reverse=True), 1)]
    found[-1][1] = max_num_seqs
    return found
