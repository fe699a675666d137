"""Whether two engines gave the same answers, and did the work that is to be proven."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from vllm_graft.proof.questions import Answer, Question, Round

TOLERANCES = {"float32": 2e-3, "float16": 0.1, "bfloat16": 0.4}
"""By dtype, how log-probabilities may differ in nats, and how near a tie may fall otherwise."""

_SEEDED_ALIKE = 0.6
"""Share of seeded tokens to be equal in 16 bits, where near ties fall otherwise; in float32 all."""


def differences(
    asked: Sequence[Round],
    found: Sequence[Sequence[Answer]],
    expected: Sequence[Sequence[Answer]],
    dtype: str,
) -> Iterator[str]:
    """A sentence for each answer of the judged engine (`found`, by round) that is not the expected
    one, but for rounding. The `expected` ones are those without our parts, which have all
    log-probabilities; `dtype`, that both computed in, is a key of `TOLERANCES`."""
    near = TOLERANCES[dtype]
    alike = total = 0
    for each, mine, theirs in zip(asked, found, expected, strict=True):
        for number, question in enumerate(each.questions):
            at = _parts_at(mine[number].tokens, theirs[number].tokens)
            where = f"{each.name}, request {number}"
            tied = dtype != "float32" and question.seed is not None
            if question.seed is not None:
                alike += at
                total += len(theirs[number].tokens)
            yield from _lengths(where, question, mine[number], theirs[number])
            yield from _told(where, mine[number], theirs[number], at, near)
            if at < len(theirs[number].tokens) and not tied:
                yield from _departed(where, mine[number], theirs[number], at, near)
    if alike < _SEEDED_ALIKE * total:
        yield f"seeds: only {alike} of {total} tokens are those without our parts"


_BROKEN = {
    "vllm:graft_vit_dropped_graphs/mismatch": "vision graphs gave other embeddings",
    "vllm:graft_vit_dropped_graphs/error": "vision graphs could not be captured",
    "vllm:graft_vit_declines/error": "batches of images failed in vision graphs",
}
"""What a server would survive by going on without, by its counter."""


def broken(counts: Mapping[str, float]) -> Iterator[str]:
    """A sentence for each failure that the engine went on without, by its counters."""
    for name, what in _BROKEN.items():
        if found := counts.get(name):
            yield f"{found:g} {what}, and were left out; the log above has the cause"


def undone(counts: Mapping[str, float], wanted: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each counter that is 0: what it counts was not shown to work. `counts`:
    counters of the engine that is judged. `wanted`: those to be above 0, and what each counts."""
    for name, what in wanted.items():
        if not counts.get(name):
            yield f"nothing was shown of {what} ({name} is 0)"


def _parts_at(mine: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = enumerate(zip_longest(mine, theirs))
    return next((at for at, (a, b) in pairs if a != b), len(theirs))


def _lengths(where: str, question: Question, mine: Answer, theirs: Answer) -> Iterator[str]:
    if len(mine.tokens) != len(theirs.tokens):
        yield f"{where}: it ends after {len(mine.tokens)} tokens, not after {len(theirs.tokens)}"
    if question.told and len(mine.logprobs) != len(mine.tokens):
        yield f"{where}: {len(mine.logprobs)} of {len(mine.tokens)} tokens have log-probabilities"


def _told(where: str, mine: Answer, theirs: Answer, at: int, near: float) -> Iterator[str]:
    for place, (found, expected) in enumerate(zip(mine.logprobs, theirs.logprobs)):
        if place > at:
            return
        gaps = [abs(found.get(token, math.nan) - each) for token, each in expected.items()]
        # No comparison with what is no number is true.
        if wrong := [gap for gap in gaps if not gap <= near]:
            yield f"{where}: log-probabilities of token {place} differ by {max(wrong):.2g}"
            return


def _departed(where: str, mine: Answer, theirs: Answer, at: int, near: float) -> Iterator[str]:
    if at >= len(mine.tokens):
        return
    expected, found = theirs.tokens[at], mine.tokens[at]
    gap = theirs.logprobs[at][expected] - theirs.logprobs[at].get(found, float("-inf"))
    if not gap <= near:
        yield f"{where}: token {at} is {found}, which is {gap:.2g} nats behind {expected}"
