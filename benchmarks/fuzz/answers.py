"""Answers of a server to requests of the fuzz, in one form for streams and whole answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.fuzz.requests import FuzzRequest

HANG = -1
"""Status of a request that was not answered in time."""
BROKEN = -2
"""Status of a request whose connection broke."""


@dataclass(frozen=True)
class Raw:
    """An answer as it came over the wire.

    Attributes:
        status: the HTTP status, or `HANG` or `BROKEN`.
        body: the JSON of an answer in one piece; its text if it is no JSON.
        events: data of a stream's events, `[DONE]` included.
        aborted: whether the client hung up.
    """

    status: int
    body: Any = None
    events: tuple[str, ...] = ()
    aborted: bool = False


@dataclass
class Place:
    """Logprobs at one place: the token's name, its logprob, and those of the best tokens."""

    token: str
    logprob: float | None
    top: dict[str, float] = field(default_factory=dict)


@dataclass
class Choice:
    """One answer, put together.

    Attributes:
        tokens: ids of the tokens; None unless asked for.
        places: a place for each token; None unless asked for.
        prompt: `prompt_logprobs`, a mapping for each token of the prompt, None for the first.
        message: other parts of a chat's message.
    """

    text: str = ""
    tokens: list[int] | None = None
    finish: str | None = None
    stop: int | str | None = None
    places: list[Place] | None = None
    prompt: list[dict[str, Any] | None] | None = None
    message: dict[str, Any] = field(default_factory=dict)


@dataclass
class Answer:
    """A whole answer.

    Attributes:
        status: the HTTP status; for an error within a stream, that error's code.
        error: its type and code, where the status is one.
        message: its text, which is shown and not compared.
        usage: tokens of prompts and of answers; None unless told.
        faults: faults in the form of the answer itself.
    """

    status: int
    error: str | None = None
    message: str = ""
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    faults: list[str] = field(default_factory=list)
    aborted: bool = False

    @property
    def ok(self) -> bool:
        return self.status == 200


def read(request: FuzzRequest, raw: Raw) -> Answer:
    """Put an answer together, and check its form."""
    answer = Answer(raw.status, aborted=raw.aborted)
    if raw.status < 0:
        answer.error = "no answer" if raw.status == HANG else "connection broken"
        answer.message = str(raw.body)
    elif raw.status != 200:
        _error(answer, raw.body)
    elif raw.events or request.stream:
        _stream(request, raw, answer)
    elif raw.body is not None:
        _whole(raw.body, answer)
    if answer.ok and not answer.aborted:
        answer.faults += _faults(request, answer)
    return answer


def _error(answer: Answer, body: Any) -> None:
    error = body.get("error", body) if isinstance(body, dict) else None
    if isinstance(error, dict):
        answer.error = f"{error.get('type')} {error.get('code')}"
        answer.message = str(error.get("message", error))
    else:
        answer.error, answer.message = "text", str(body)


def _whole(body: Any, answer: Answer) -> None:
    for part in body["choices"]:
        choice = answer.choices.setdefault(part["index"], Choice())
        _add(choice, part, part.get("message"))
        prompt = part.get("prompt_logprobs") or body.get("prompt_logprobs")
        if prompt:
            choice.prompt = prompt
    _usage(answer, body)


def _stream(request: FuzzRequest, raw: Raw, answer: Answer) -> None:
    events = list(raw.events)
    ended = bool(events) and events[-1] == "[DONE]"
    if ended:
        events.pop()
    elif not raw.aborted:
        answer.faults.append("the stream has no end")
    for event in events:
        chunk = json.loads(event)
        if "error" in chunk:
            _error(answer, chunk)
            answer.status = int(chunk["error"].get("code") or 500)
            return
        if "delta" not in event and request.chat and chunk["choices"]:
            answer.faults.append("a chunk has no delta")
        for part in chunk["choices"]:
            choice = answer.choices.setdefault(part["index"], Choice())
            if choice.finish is not None:
                answer.faults.append("a chunk behind the end of its answer")
            _add(choice, part, part.get("delta"))
        _usage(answer, chunk)


def _add(choice: Choice, part: dict[str, Any], message: dict[str, Any] | None) -> None:
    """Append a chunk, or a whole answer, to what has come so far."""
    text = part.get("text") if message is None else message.get("content")
    choice.text += text or ""
    for name, value in (message or {}).items():
        if name != "content" and value:
            choice.message[name] = value
    if part.get("token_ids") is not None:
        choice.tokens = (choice.tokens or []) + part["token_ids"]
    places = part.get("logprobs")
    if places is not None:
        choice.places = (choice.places or []) + list(_places(places))
    if part.get("finish_reason") is not None:
        choice.finish = part["finish_reason"]
        choice.stop = part.get("stop_reason")


def _places(logprobs: dict[str, Any]) -> Iterator[Place]:
    if "content" in logprobs:
        for entry in logprobs["content"] or []:
            top = {each["token"]: each["logprob"] for each in entry.get("top_logprobs") or []}
            # The best tokens of a place need not include the chosen one.
            yield Place(entry["token"], entry.get("logprob"), top)
        return
    for token, logprob, best in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]
    ):
        yield Place(token, logprob, dict(best or {}))


def _usage(answer: Answer, body: dict[str, Any]) -> None:
    usage = body.get("usage")
    if usage:
        told = (usage["prompt_tokens"], usage.get("completion_tokens") or 0)
        answer.usage = told


def _faults(request: FuzzRequest, answer: Answer) -> Iterator[str]:
    """Yield faults that no answer may have, whatever its text."""
    if not answer.choices:
        yield "no choice"
    for index, choice in answer.choices.items():
        if choice.finish is None:
            yield f"choice {index} has no finish reason"
        if choice.finish not in (None, "stop", "length", "tool_calls", "repetition"):
            yield f"choice {index} finished by {choice.finish}"
        if choice.tokens is None or choice.places is None:
            continue
        echoed = request.get("echo") and not request.chat
        if not echoed and len(choice.places) != len(choice.tokens):
            yield (
                f"choice {index} has {len(choice.places)} logprobs for {len(choice.tokens)} tokens"
            )
    told = [len(choice.tokens) for choice in answer.choices.values() if choice.tokens is not None]
    if answer.usage and len(told) == len(answer.choices) and sum(told) != answer.usage[1]:
        yield f"usage tells of {answer.usage[1]} tokens, there are {sum(told)}"
