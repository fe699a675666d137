"""Greedy answers of engines whose numbers are rounded: equal, but for near ties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest


class Answer(NamedTuple):
    tokens: list[int]
    best: list[dict[int, float]]


class Departure(NamedTuple):
    """Where two continuations of a prompt part.

    Attributes:
        prompt: the prompt's number.
        place: the first token that differs.
        gap: by how much the expected token is more probable than the other one, by the log-
            probabilities of the expected answer; infinite where the other one is not listed.
    """

    prompt: int
    place: int
    gap: float


def answers(
    llm: LLM,
    prompts: list[list[int]],
    tokens: int,
    adapters: Sequence[LoRARequest | None] | None = None,
) -> list[Answer]:
    """The greedy continuations of prompts, exactly ``tokens`` long."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=5)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    used = None if adapters is None else list(adapters)
    found = []
    for output in llm.generate(given, params, lora_request=used, use_tqdm=False):
        first = output.outputs[0]
        best = [{t: p.logprob for t, p in place.items()} for place in first.logprobs or ()]
        found.append(Answer(list(first.token_ids), best))
    return found


def departures(found: Sequence[Answer], expected: Sequence[Answer]) -> list[Departure]:
    """Where continuations part from the expected ones; from there on they have other contexts."""
    parted = []
    for prompt, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        for place, (token, other) in enumerate(zip(theirs.tokens, mine.tokens, strict=True)):
            if token != other:
                best = theirs.best[place]
                gap = best[token] - best.get(other, float("-inf"))
                parted.append(Departure(prompt, place, gap))
                break
    return parted


def compared(found: Sequence[Answer], expected: Sequence[Answer]) -> float:
    """The share of tokens that lie before the continuations part."""
    parted = {each.prompt: each.place for each in departures(found, expected)}
    places = sum(parted.get(prompt, len(each.tokens)) for prompt, each in enumerate(expected))
    return places / sum(len(each.tokens) for each in expected)


def check_near_ties(
    found: Sequence[Answer], expected: Sequence[Answer], near: float, least: float = 0.3
) -> None:
    """Print where continuations part, and check that they part at near ties alone."""
    parted, share = departures(found, expected), compared(found, expected)
    print(f"{share:.0%} compared; {parted}")
    assert all(each.gap < near for each in parted), parted
    assert share > least
