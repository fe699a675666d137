"""Streams and whole answers of the fuzz are read into the same form, and checked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.fuzz.answers import BROKEN, HANG, Answer, Place, Raw, read
from benchmarks.fuzz.requests import CHAT, COMPLETIONS, FuzzRequest


def request(path: str = COMPLETIONS, abort_after: int | None = None, **body: Any) -> FuzzRequest:
    return FuzzRequest(0, path, {"temperature": 0, **body}, abort_after=abort_after)


def logprobs(*tokens: str) -> dict[str, Any]:
    return {
        "tokens": list(tokens),
        "token_logprobs": [-1.0] * len(tokens),
        "top_logprobs": [{token: -1.0} for token in tokens],
    }


def whole(**parts: Any) -> Raw:
    choice = {
        "index": 0,
        "text": "ab",
        "token_ids": [3, 4],
        "logprobs": logprobs("a", "b"),
        "finish_reason": "length",
        "stop_reason": None,
    }
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    return Raw(200, {"choices": [{**choice, **parts}], "usage": usage})


def events(*parts: dict[str, Any], end: bool = True) -> Raw:
    said = [json.dumps({"choices": [{"index": 0, **part}]}) for part in parts]
    usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
    return Raw(200, None, (*said, json.dumps(usage), *(["[DONE]"] if end else [])))


FIRST = {"text": "a", "token_ids": [3], "logprobs": logprobs("a")}
LAST = {"text": "b", "token_ids": [4], "logprobs": logprobs("b"), "finish_reason": "length"}


def test_a_stream_is_put_together_into_the_whole_answer() -> None:
    found = read(request(stream=True), events(FIRST, LAST))
    assert found == read(request(), whole())
    assert found.faults == []
    choice = found.choices[0]
    assert (choice.text, choice.tokens, choice.finish) == ("ab", [3, 4], "length")
    assert choice.places == [Place("a", -1.0, {"a": -1.0}), Place("b", -1.0, {"b": -1.0})]
    assert found.usage == (5, 2)


def test_a_chat_is_put_together_too() -> None:
    entry = {"token": "a", "logprob": -1.0, "top_logprobs": [{"token": "a", "logprob": -1.0}]}
    chunk = {"delta": {"role": "assistant", "content": ""}}
    said = {"delta": {"content": "a"}, "logprobs": {"content": [entry]}, "finish_reason": "stop"}
    found = read(request(CHAT, stream=True), events(chunk, said))
    message = {"role": "assistant", "content": "a"}
    answer = {"index": 0, "message": message, "logprobs": {"content": [entry]}}
    body = {
        "choices": [{**answer, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2},
        "prompt_logprobs": None,
    }
    assert found == read(request(CHAT), Raw(200, body))
    assert found.choices[0].message == {"role": "assistant"}
    assert found.choices[0].places == [Place("a", -1.0, {"a": -1.0})]


def test_errors_have_a_status_wherever_they_are_told() -> None:
    error = {"error": {"type": "BadRequestError", "code": 400, "message": "no"}}
    plain = read(request(), Raw(400, error))
    streamed = read(request(stream=True), Raw(200, None, (json.dumps(error), "[DONE]")))
    assert plain == streamed == Answer(400, "BadRequestError 400", "no")
    assert read(request(), Raw(500, "Internal Server Error")).error == "text"
    assert read(request(), Raw(HANG, "time")).error == "no answer"
    assert read(request(), Raw(BROKEN, "reset")).error == "connection broken"


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (events(FIRST, LAST, end=False), "the stream has no end"),
        (events(FIRST, LAST, LAST), "a chunk behind the end of its answer"),
        (events(FIRST), "choice 0 has no finish reason"),
        (events({**FIRST, "token_ids": [3, 9]}, LAST), "choice 0 has 2 logprobs for 3 tokens"),
        (events(FIRST, {**LAST, "token_ids": []}), "usage tells of 2 tokens, there are 1"),
        (events(FIRST, {**LAST, "finish_reason": "abort"}), "choice 0 finished by abort"),
        (Raw(200, None, ("[DONE]",)), "no choice"),
    ],
)
def test_what_no_answer_may_have_is_a_fault(raw: Raw, fault: str) -> None:
    assert fault in read(request(stream=True), raw).faults


def test_a_stream_that_was_broken_off_needs_no_end() -> None:
    raw = Raw(200, None, events(FIRST).events[:1], aborted=True)
    found = read(request(stream=True, abort_after=1), raw)
    assert found.aborted
    assert found.faults == []
    assert found.choices[0].tokens == [3]


def test_an_echoed_prompt_has_logprobs_without_tokens() -> None:
    echoed = whole(text="pab", logprobs=logprobs("p", "a", "b"))
    assert read(request(echo=True), echoed).faults == []
    assert read(request(), echoed).faults == ["choice 0 has 3 logprobs for 2 tokens"]
