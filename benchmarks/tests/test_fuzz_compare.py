"""Each rule of the fuzz's comparison explains its own case, and lets nothing else pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.fuzz.answers import Answer, Choice, Place
from benchmarks.fuzz.compare import LOGPROB_TOLERANCE, TIE, Judge
from benchmarks.fuzz.requests import CHAT, COMPLETIONS, FuzzRequest
from benchmarks.fuzz.rules import ALWAYS, STOCK_CHAIN, WITH_DRAFTS


def request(path: str = COMPLETIONS, *, exact: bool = True, **body: Any) -> FuzzRequest:
    abort = body.pop("abort_after", None)
    return FuzzRequest(0, path, {"temperature": 0, **body}, exact=exact, abort_after=abort)


def answer() -> Answer:
    places = [Place(t, -1.0, {t: -1.0, "x": -2.0, "y": -3.0}) for t in "abc"]
    prompt = [None, {"7": {"logprob": -0.5, "rank": 1}, "8": {"logprob": -2.5, "rank": 2}}]
    choice = Choice("abc", [3, 4, 5], "length", None, places, prompt, {"role": "assistant"})
    return Answer(200, choices={0: choice, 1: copy.deepcopy(choice)}, usage=(5, 6))


def error(status: int, message: str = "") -> Answer:
    return Answer(status, f"Error {status}", message)


def no_tie(*asked: Any) -> float | None:
    return None


JUDGE = Judge(no_tie, {})


def verdict(
    change: Callable[[Answer], object], asked: FuzzRequest | None = None, judge: Judge = JUDGE
) -> tuple[str | None, list[str]]:
    """Return the rule, and the differences, when an arm's answer is changed."""
    found = answer()
    change(found)
    result = judge.compare(asked or request(), answer(), found)
    return result.rule, [each.what for each in result.differences]


CHANGES: dict[str, tuple[Callable[[Answer], object], str]] = {
    "token": (lambda a: a.choices[1].tokens.__setitem__(2, 9), "tokens"),  # type: ignore[index]
    "tokens missing": (lambda a: a.choices[0].tokens.pop(), "tokens"),  # type: ignore[union-attr]
    "no tokens": (lambda a: setattr(a.choices[0], "tokens", None), "tokens"),
    "text": (lambda a: setattr(a.choices[0], "text", "abd"), "text"),
    "finish": (lambda a: setattr(a.choices[0], "finish", "stop"), "finish"),
    "stop": (lambda a: setattr(a.choices[0], "stop", "b"), "stop"),
    "message": (lambda a: a.choices[0].message.clear(), "message"),
    "usage": (lambda a: setattr(a, "usage", (5, 7)), "usage"),
    "choice": (lambda a: a.choices.pop(1), "choices"),
    "fault": (lambda a: a.faults.append("the stream has no end"), "faults"),
    "status": (lambda a: setattr(a, "status", 500), "status"),
    "logprob": (lambda a: setattr(a.choices[0].places[1], "logprob", -1.1), "logprobs"),  # type: ignore[index]
    "name": (lambda a: setattr(a.choices[0].places[1], "token", "q"), "logprobs"),  # type: ignore[index]
    "place": (lambda a: a.choices[0].places.pop(), "logprobs"),  # type: ignore[union-attr]
    "best": (lambda a: a.choices[0].places[0].top.update(x=-2.5), "logprobs"),  # type: ignore[index]
    "other best": (lambda a: a.choices[0].places[0].top.update(z=-0.1), "logprobs"),  # type: ignore[index]
    "prompt": (lambda a: a.choices[0].prompt[1]["7"].update(logprob=-0.6), "prompt"),  # type: ignore[index]
    "rows": (lambda a: a.choices[0].prompt.append({}), "prompt"),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_differs_is_found_and_not_explained(change: str) -> None:
    alter, what = CHANGES[change]
    assert verdict(alter) == (None, [what])


def test_equal_answers_are_equal() -> None:
    assert verdict(lambda a: None) == ("", [])
    assert JUDGE.compare(request(), error(400, "a"), error(400, "b")).rule == ""


def test_rounding_is_no_difference() -> None:
    def rounded(found: Answer) -> None:
        for choice in found.choices.values():
            for place in choice.places or []:
                place.logprob = -1.0 + LOGPROB_TOLERANCE / 2
                place.top = {
                    name: value - LOGPROB_TOLERANCE / 2 for name, value in place.top.items()
                }

    assert verdict(rounded) == ("", [])


def test_the_last_of_the_best_may_have_changed_places_with_its_equal() -> None:
    def swapped(found: Answer, value: float) -> None:
        top = found.choices[0].places[0].top  # type: ignore[index]
        del top["y"]
        top["z"] = value

    assert verdict(lambda a: swapped(a, -3.0)) == ("", [])
    assert verdict(lambda a: swapped(a, -2.9)) == (None, ["logprobs"])


# --- near ties --------------------------------------------------------------------------------


def forked(found: Answer) -> None:
    """Make two answers that differ from the second token on."""
    choice = found.choices[1]
    choice.tokens, choice.text = [3, 9, 9], "aqq"


def tied(gap: float | None, asked: list[Any] | None = None) -> Judge:
    def tell(*question: Any) -> float | None:
        if asked is not None:
            asked.append(question[1:])
        return gap

    return Judge(tell, {})


def test_a_greedy_answer_may_fork_where_two_tokens_are_equally_likely() -> None:
    asked: list[Any] = []
    assert verdict(forked, judge=tied(TIE / 2, asked))[0] == "near tie"
    assert asked == [(1, 1, 9)], "of the second answer, at the second place, the arm's token"


@pytest.mark.parametrize("gap", [None, TIE * 2, -TIE * 2])
def test_elsewhere_it_may_not(gap: float | None) -> None:
    assert verdict(forked, judge=tied(gap))[0] is None


STEERED: list[dict[str, Any]] = [
    {"temperature": 1, "seed": 1},
    {"bad_words": ["a"]},
    {"presence_penalty": 1.0},
    {"structured_outputs": {"regex": "a"}},
    {"min_tokens": 3},
]


@pytest.mark.parametrize("body", STEERED)
def test_what_does_not_follow_the_logits_alone_is_no_tie(body: dict[str, Any]) -> None:
    assert verdict(forked, request(**body), tied(0.0))[0] is None


def test_a_tie_excuses_its_own_answer_alone() -> None:
    def both(found: Answer) -> None:
        forked(found)
        found.choices[0].text = "abd"

    assert verdict(both, judge=tied(0.0))[0] is None


# --- requests that nothing determines, and those that are broken off -----------------------------


def test_without_a_seed_only_the_form_is_compared() -> None:
    asked = request(exact=False, temperature=1)
    assert verdict(forked, asked)[0] == "no seed"
    assert verdict(lambda a: a.faults.append("the stream has no end"), asked)[0] is None
    assert verdict(lambda a: a.choices.pop(1), asked)[0] is None
    assert verdict(CHANGES["rows"][0], asked)[0] is None


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_the_shorter_of_two_broken_streams_begins_the_longer(length: int) -> None:
    def shorter(found: Answer) -> None:
        found.aborted = True
        for choice in found.choices.values():
            choice.tokens, choice.text = (choice.tokens or [])[:length], choice.text[:length]
            choice.finish = None

    assert verdict(shorter, request(abort_after=2))[0] == "abort"


def test_a_broken_stream_that_goes_another_way_is_found() -> None:
    asked = request(abort_after=2)
    assert verdict(forked, asked) == (None, ["tokens"])
    assert verdict(forked, asked, tied(0.0))[0] == "abort"
    assert verdict(lambda a: setattr(a, "status", 500), asked) == (None, ["status"])

    def without_ids(found: Answer) -> None:
        found.choices[0].tokens, found.choices[0].text = None, "aq"

    assert verdict(without_ids, asked) == (None, ["text"])


# --- known differences of stock vLLM
# ---------------------------------------------------------------

REFUSAL = error(400, "The min_p and logit_bias sampling parameters are not supported with ...")


@pytest.mark.parametrize("body", [{"min_p": 0.1}, {"logit_bias": {"7": 1}}])
def test_two_options_are_refused_beside_drafts(body: dict[str, Any]) -> None:
    drafting, other = Judge(no_tie, WITH_DRAFTS), Judge(no_tie, ALWAYS)
    asked = request(**body)
    assert drafting.compare(asked, answer(), REFUSAL).rule == "refused with drafts"
    assert other.compare(asked, answer(), REFUSAL).rule is None
    assert drafting.compare(asked, answer(), error(400, "other")).rule is None
    assert drafting.compare(request(), answer(), REFUSAL).rule is None


def test_echoes_of_several_streams_may_fail() -> None:
    judge = Judge(no_tie, ALWAYS)
    body: dict[str, Any] = {
        "echo": True,
        "logprobs": 1,
        "n": 2,
        "stream": True,
        "temperature": 1,
        "seed": 1,
    }
    assert judge.compare(request(**body), answer(), error(500)).rule == "echo of several"
    assert judge.compare(request(**body), error(500), answer()).rule == "echo of several"
    for name in ("echo", "logprobs", "n", "stream"):
        fewer = {key: value for key, value in body.items() if key != name}
        assert judge.compare(request(**fewer), answer(), error(500)).rule is None, name
    assert judge.compare(request(CHAT, **body), answer(), error(500)).rule is None
    assert judge.compare(request(**body), answer(), error(400)).rule is None
    lost, other = answer(), answer()
    lost.choices[1].places = []
    other.choices[1].tokens = [3, 4, 6]
    assert judge.compare(request(**body), answer(), lost).rule == "echo of several"
    assert judge.compare(request(**body), answer(), other).rule is None


def test_rules_of_the_chain_are_of_the_chain_alone() -> None:
    chain, ours = Judge(no_tie, STOCK_CHAIN), Judge(no_tie, WITH_DRAFTS)
    found = answer()
    forked(found)
    seeded = request(temperature=1, seed=3)
    assert chain.compare(seeded, answer(), found).rule == "stock: seeds"
    assert chain.compare(request(), answer(), found).rule is None
    one = request(prompt=[7], prompt_logprobs=1)
    assert chain.compare(one, answer(), found).rule == "stock: rows of drafts"
    assert chain.compare(request(prompt=[7] * 20, prompt_logprobs=1), answer(), found).rule is None
    ids = request(logprob_token_ids=[5], logprobs=1)
    assert chain.compare(ids, answer(), error(500)).rule == "stock: ids"
    for asked in (seeded, one, ids):
        assert ours.compare(asked, answer(), found).rule is None
