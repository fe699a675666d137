"""Requests of a closed loop, and the order in which they are sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Request:
    """What is asked.

    Attributes:
        prompt: a text, or token ids and a salt, as ``vllm.LLM`` takes it.
        max_tokens: tokens of the answer at most, if the case allows more.
        session: a name. Requests of one session follow each other.
        schema: the JSON schema that the answer is bound to.
        prediction: what the answer will probably be.
    """

    prompt: Any
    max_tokens: int | None = None
    session: str | None = None
    schema: Mapping[str, Any] | None = None
    prediction: str | None = None

    def body(self, limit: int) -> dict[str, Any]:
        """What the API's body says of the answer, which has `limit` tokens at most.

        It has all of them, unless a schema says where it ends.
        """
        most = min(limit, self.max_tokens or limit)
        said: dict[str, Any] = {"max_tokens": most, "ignore_eos": not self.schema}
        if self.schema:
            said["structured_outputs"] = {"json": self.schema}
        if self.prediction:
            said["vllm_xargs"] = {"graft_prediction": self.prediction}
        return said


class Waiting:
    """Requests that are not sent yet, each with what belongs to it."""

    def __init__(self, requests: Iterable[tuple[Request, Any]]) -> None:
        self._left = list(requests)
        self._busy: set[str | None] = set()

    def take(self) -> tuple[Request, Any] | None:
        """The first one whose session has no request in flight; None if there is none."""
        for place, (request, _) in enumerate(self._left):
            if request.session not in self._busy:
                self._busy |= {request.session} - {None}
                return self._left.pop(place)
        return None

    def end(self, request: Request) -> None:
        """Note that a request was answered."""
        self._busy.discard(request.session)
