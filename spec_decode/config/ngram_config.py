"""What stands under ``graft.tree.ngram``."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from vllm_graft.base.options import Count, Section

MAX_LENGTH = 32
"""Longest match that is told from shorter ones."""

MAX_REFERENCE = 1 << 20
"""Most tokens of a reference."""


class NgramConfig(Section):
    """N-grams of a request's own text, prompt and answer, as drafts beside those of the draft."""

    min: Count = Field(default=3, ge=1, le=MAX_LENGTH)
    """Tokens at the end of the text that must have occurred before, at least (vLLM's
    ``prompt_lookup_min``)."""

    max: Count = Field(default=16, ge=1, le=MAX_LENGTH)
    """Tokens at the end of the text that are compared, at most (``prompt_lookup_max``); not below
    ``min``. How often a match of each length goes on as it did before is learned while serving;
    matches of ``max`` tokens or more share one rate."""

    reference: Count = Field(default=2048, ge=0, le=MAX_REFERENCE)
    """Tokens of a second text per request in which its end is looked for as well: what its JSON
    schema or its choices force, and the answer that ``graft_prediction`` predicts. No more than
    the context. 0: none."""

    def room(self, max_model_len: int) -> int:
        """Tokens that a reference may have: no answer is longer than a context."""
        return min(self.reference, max_model_len)

    @model_validator(mode="after")
    def _in_order(self) -> NgramConfig:
        if self.min > self.max:
            raise ValueError(f"min is {self.min}, and max is {self.max}: min must not exceed max")
        return self


def lengths_of(tree: Any, speculative: Any) -> NgramConfig:
    """The section of n-grams alone: vLLM's own keys in its ``SpeculativeConfig`` have the
    lengths."""
    lengths = {"min": speculative.prompt_lookup_min, "max": speculative.prompt_lookup_max}
    given = {} if tree.ngram is None else {"reference": tree.ngram.reference}
    return NgramConfig(**lengths, **given)


def ngram_section(value: object) -> object:
    """``true`` and ``auto`` for all defaults, ``false`` for none; also as the words of a
    command."""
    if value is None or isinstance(value, (dict, NgramConfig)):
        return value
    word = value.lower() if isinstance(value, str) else value
    if word is True or word in ("true", "auto"):
        return NgramConfig()
    if word is False or word == "false":
        return None
    raise ValueError("say true, false, or a mapping such as {'min': 3, 'max': 16}")
