"""What both engines are asked, and their answers with what they did for them."""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_graft.base.errors import GraftError
from vllm_graft.proof.tiny_config import TEXT_TOKENS, VOCABULARY

BATCH_TOKENS = 128
"""Tokens of a step: longer prompts are computed in chunks."""

MODEL_LENGTH = 384
REQUESTS = 4
"""Requests that run at once."""

_TOKENS = 16
_MOST_STEPS = 2000
_LONG = 200
_PREFIX = 160
_SIGHTS = 4
"""How often each layout of images comes: in a padded graph, to be captured, and twice after that,
as the first replay is checked while it serves."""

_BATCHES = ((0, 2), (0, 1), (1, 1))
"""Which size the images of each request have, and how many there are. The first two are encoded at
once, and the second of them lies behind so much text that it is read in two steps."""

_BEFORE = 40
"""Tokens of text before images."""

Logprobs = list[dict[int, float]]

Look = Callable[[tuple[int, ...], int, int, int], dict[str, Any]]
"""Makes what an engine is given of a prompt, and of images of a size, drawn anew by the round."""


@dataclass(frozen=True)
class Question:
    """A prompt of token ids; `seed` None is greedy; `told` asks for logprobs, too. `sight` is what
    an engine is given in the prompt's place if it has images."""

    prompt: tuple[int, ...]
    seed: int | None = None
    told: bool = False
    sight: Any = None


@dataclass(frozen=True)
class Round:
    """Questions that are asked at once, to show what `name` says. After the steps `preempt_at` all
    running requests are preempted; with `forget` the device's prefix cache is emptied before."""

    name: str
    questions: tuple[Question, ...]
    preempt_at: tuple[int, ...] = ()
    forget: bool = False


@dataclass
class Answer:
    """Tokens, and the log-probabilities of all tokens at each place; none if nobody asked."""

    tokens: list[int]
    logprobs: Logprobs = field(default_factory=list)


def rounds(*, cache: bool, look: Look | None = None) -> Iterator[Round]:
    """The questions: greedy and seeded, in chunks, on shared prefixes, preempted. `cache`: whether
    a host cache is asked to bring back what the device has forgotten. `look`: makes requests about
    images; None if none are asked about."""
    numbers = random.Random(0)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(numbers.choices(TEXT_TOKENS, k=length))

    long = prompt(_LONG)
    first = (Question(prompt(3), told=True), Question(long), Question(prompt(40), told=True))
    shared = tuple(Question(long[:_PREFIX] + prompt(size), told=size > 9) for size in (1, 17))
    again = (*shared, Question(long, told=True))
    yield Round("prompts", first)
    yield Round("prefixes", again)
    seeds = tuple(Question(prompt(9 + seed), seed, told=seed % 2 == 0) for seed in range(REQUESTS))
    yield Round("seeds", seeds)
    # No tree of a proof is so deep that a request has ended before.
    yield Round("preemption", (*first, seeds[1]), preempt_at=(2, 4))
    if cache:
        others = [tuple(Question(prompt(_LONG)) for _ in range(2)) for _ in range(3)]
        yield Round("host cache", again, forget=True)
        # Whole prefixes are the same to attention in any order of their blocks, parts are not.
        part = Question(long[: _PREFIX // 2] + prompt(2), told=True)
        yield Round("parts of what was loaded", (part,))
        for number, other in enumerate(others):
            yield Round(f"eviction {number}", other)
        yield Round("after evictions", (*again, *others[0]), forget=True)
        yield Round("prefixes of the host cache", (*others[1], *others[2]), forget=True)
    if look is None:
        return
    for number in range(_SIGHTS):
        sights = [look(prompt(_BEFORE), size, count, number) for size, count in _BATCHES]
        asked = (Question((), told=True, sight=each) for each in sights)
        yield Round(f"images {number}", tuple(asked))


class Asking:
    """Asks an engine of this process. `llm`: a ``vllm.LLM`` whose engine core runs in this process.
    `told`: whether all logprobs are asked for, as of the engine that the other is judged by."""

    def __init__(self, llm: Any, *, told: bool) -> None:
        self._llm, self._told = llm, told

    def ask(self, asked: Sequence[Round]) -> list[list[Answer]]:
        """The answers to each round's questions, from an engine that remembers nothing."""
        self._forget(reset_connector=True)
        return [list(self._round(each)) for each in asked]

    def _round(self, asked: Round) -> Iterator[Answer]:
        engine = self._llm.llm_engine
        if asked.forget:
            self._forget()
        for number, question in enumerate(asked.questions):
            given = question.sight or {"prompt_token_ids": list(question.prompt)}
            engine.add_request(str(number), given, self._params(question))
        found: dict[str, Any] = {}
        for step in range(_MOST_STEPS):
            if not engine.has_unfinished_requests():
                break
            if step in asked.preempt_at:
                # It preempts, and then fails where blocks are still copied to the host.
                with contextlib.suppress(RuntimeError):
                    self._llm.reset_prefix_cache(reset_running_requests=True)
            found |= {each.request_id: each.outputs[0] for each in engine.step()}
        else:
            raise GraftError(f"{asked.name}: no end after {_MOST_STEPS} steps")
        for number in range(len(asked.questions)):
            answer = found[str(number)]
            places = [{t: p.logprob for t, p in place.items()} for place in answer.logprobs or ()]
            yield Answer(list(answer.token_ids), places)

    def _forget(self, **more: bool) -> None:
        for _ in range(_MOST_STEPS):
            if self._llm.reset_prefix_cache(**more):
                return
            # The last blocks are still written to the host.
            self._llm.llm_engine.step()
        raise GraftError("the prefix cache can't be emptied: some request keeps its blocks")

    def _params(self, question: Question) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0.0 if question.seed is None else 1.0,
            seed=question.seed,
            max_tokens=_TOKENS,
            ignore_eos=True,
            detokenize=False,
            logprobs=VOCABULARY if self._told or question.told else None,
        )

    def counts(self) -> dict[str, float]:
        """vLLM's counters and ours, in all, and by kind or reason as ``name/kind``."""
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            by = metric.labels.get("kind") or metric.labels.get("reason")
            for name in (metric.name, f"{metric.name}/{by}"):
                found[name] = found.get(name, 0.0) + float(getattr(metric, "value", 0))
        return found
