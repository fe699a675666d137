"""A request of a workload, and the line of a JSONL file that holds it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, str]
"""A `role` (system, user, assistant or tool), and its `content`."""

_PIECE = re.compile(r" ?\w+| ?[^\w\s]+|\s+(?!\S)|\s+")


def pieces(text: str) -> list[str]:
    """Words, signs and spaces, as tokenizers part a text first; tokens where there is no model."""
    found: list[str] = _PIECE.findall(text)
    return found


@dataclass(frozen=True)
class Request:
    """What is asked, and what a good model would answer.

    Attributes:
        messages: the chat so far; the answer follows its last one.
        answer: what is said then, as far as somebody knows; empty otherwise.
        output_tokens: tokens of the answer at most; 0: as many as the answer has pieces.
        tools: the tools that may be called, in the form of OpenAI's API.
        schema: the JSON schema that the answer is bound to.
        session: a name. Requests of one session follow each other, each with the ones before it in
            its messages.
        cache_salt: as vLLM's, of the tenant who asks.
        prediction: what the client predicts the answer to be.
    """

    messages: list[Message]
    answer: str = ""
    output_tokens: int = 0
    tools: list[dict[str, Any]] = field(default_factory=list)
    schema: dict[str, Any] = field(default_factory=dict)
    session: str = ""
    cache_salt: str = ""
    prediction: str = ""

    @property
    def prompt(self) -> str:
        """The chat as one text, for models without a chat template."""
        if len(self.messages) == 1:
            return self.messages[0]["content"]
        return "".join(f"{each['role']}: {each['content']}\n" for each in self.messages)

    def line(self, tokenizer: Any = None) -> dict[str, Any]:
        """The line; of it, vLLM's `custom` dataset reads `prompt` and `output_tokens`.

        With a tokenizer, `prompt` is the chat in its template (`--skip-chat-template`).
        """
        prompt, most = self.prompt, self.output_tokens or max(16, len(pieces(self.answer)))
        if tokenizer is not None:
            prompt = tokenizer.apply_chat_template(
                self.messages, tools=self.tools or None, add_generation_prompt=True, tokenize=False
            )
        known = {name: value for name, value in vars(self).items() if value}
        return {"prompt": prompt, **known, "output_tokens": most}
