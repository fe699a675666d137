"""References of requests: texts that their answers are likely to hold, as tokens."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from vllm_graft.base.log import warning_once
from vllm_graft.spec_decode.counts.tree_metrics import REFERENCE_DECLINES, REFERENCE_SOURCES
from vllm_graft.spec_decode.lookup.choice_text import choices_in
from vllm_graft.spec_decode.lookup.forced_text import Piece, pieces_of
from vllm_graft.spec_decode.lookup.predictions import KEY, Wrong, prediction_of
from vllm_graft.spec_decode.lookup.schema_text import (
    COMPACT,
    INDENTED,
    SPACED,
    Style,
    schema_items,
)
from vllm_graft.spec_decode.lookup.tag_text import tag_items
from vllm_graft.spec_decode.trees.ngram_state import BORDER

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    from vllm_graft.base.metric import Numbers

MAX_SCHEMA = 1 << 16
"""Characters of a schema that is read."""

CHARACTERS = 16
"""Characters that are taken for a token at most, before there are tokens."""

CACHED = 512
"""Schemas and choices whose tokens are kept."""


class Tokenizer(Protocol):
    """What vLLM's tokenizers have in common."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


class Tokens(NamedTuple):
    """The tokens of a `Piece`."""

    tokens: tuple[int, ...]
    opens: bool


class Found(NamedTuple):
    """What one source says about an answer.

    Attributes:
        source: one of `REFERENCE_SOURCES`.
        pieces: what is known of the answer, the likeliest at the end.
        is_cut: whether something was left out already.
    """

    source: str
    pieces: Sequence[Tokens]
    is_cut: bool = False


class References:
    """Makes the reference of each new request: a function of its parameters and its prompt.

    All ranks make the same one.

    Args:
        tokenizer: the served model's; None if vLLM has none.
        room: most tokens of a reference.
        opening: tokens of the prompt's end that stand before what opens an answer, so that a match
            is found where the answer begins.
        vocab_size: tokens of the target.
        styles: layouts of JSON, the likeliest one first.

    Attributes:
        tokens: tokens of references, by source.
        declines: requests, by reason.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        room: int,
        opening: int,
        vocab_size: int,
        styles: Sequence[Style],
    ) -> None:
        self.tokenizer, self.room, self.opening = tokenizer, room, opening
        self.vocab_size, self.styles = vocab_size, tuple(styles)
        self.tokens = Counter(dict.fromkeys(REFERENCE_SOURCES, 0))
        self.declines = Counter(dict.fromkeys(REFERENCE_DECLINES, 0))
        self._read = functools.lru_cache(CACHED)(self._tokens_of)

    def of(self, params: SamplingParams | None, prompt: Sequence[int] | None) -> list[int]:
        """The reference of a request, with a `BORDER` between pieces; empty if it has none.

        What is likelier stands behind: there the last of equal matches is found.

        Args:
            params: the request's parameters.
            prompt: its tokens; None if they are embeddings.
        """
        if params is None:
            return []
        try:
            found = [self._predicted(params), self._forced(params.structured_outputs)]
        except Exception as error:
            # A tokenizer refuses some texts, such as half of a surrogate pair. The request is
            # served without a reference.
            self.declines["error"] += 1
            warning_once(f"a request has no reference: {type(error).__name__}: {error}")
            return []
        made = [each for each in found if each is not None]
        if not made:
            return []
        return self._row(made, list((prompt or ())[-self.opening :]))

    def numbers(self) -> Numbers:
        """The numbers of the metrics."""
        return {"reference_tokens": dict(self.tokens), "reference_declines": dict(self.declines)}

    def _row(self, found: list[Found], opening: list[int]) -> list[int]:
        """Pieces from the likeliest on as long as there is room, the likeliest at the end."""
        pieces: list[list[int]] = []
        left, is_cut = self.room, any(each.is_cut for each in found)
        for source, made, _ in found:
            for piece in reversed(made):
                before = opening if piece.opens else []
                room = left - len(before)
                # Of a prediction the beginning is of use, of another piece a part is not.
                fits = len(piece.tokens) if source != "prediction" else 1
                if room < fits:
                    is_cut = True
                    continue
                kept = piece.tokens[:room]
                is_cut = is_cut or len(kept) < len(piece.tokens)
                self.tokens[source] += len(kept)
                pieces.append([*before, *kept])
                left = room - len(kept) - 1
        self.declines["cut"] += is_cut
        row: list[int] = []
        for tokens in reversed(pieces):
            row += [*([BORDER] if row else []), *tokens]
        return row

    def _predicted(self, params: SamplingParams) -> Found | None:
        given = prediction_of(params, self.vocab_size)
        if isinstance(given, Wrong):
            self.declines["wrong_type"] += 1
            warning_once(f"a request's {KEY} is not used: {given.reason}")
            return None
        if not given:
            return None
        if isinstance(given, list):
            return Found("prediction", [Tokens(tuple(given), opens=True)])
        if not self._has_tokenizer():
            return None
        # A longer text would not find room, and would take long to split.
        text = given[: self.room * CHARACTERS]
        return Found("prediction", self._split([Piece(text, opens=True)]), text != given)

    def _forced(self, params: StructuredOutputsParams | None) -> Found | None:
        """What structured output forces of an answer, if it is of a kind that we can read."""
        if params is None:
            return None
        given: Any
        if (choices := _choices(params)) is not None:
            kind, given = "choice", choices
        elif params.json is not None:
            kind, given = "schema", params.json
        elif params.structural_tag is not None:
            kind, given = "tag", params.structural_tag
        else:
            return None
        if not self._has_tokenizer():
            return None
        pieces = self._read(kind, given if isinstance(given, str) else json.dumps(given))
        if not pieces:
            self.declines["unreadable"] += 1
            return None
        return Found("choice" if kind == "choice" else "schema", pieces)

    def _has_tokenizer(self) -> bool:
        """Whether texts can be read; it is counted where they can't."""
        self.declines["no_tokenizer"] += self.tokenizer is None
        return self.tokenizer is not None

    def _tokens_of(self, kind: str, given: str) -> Sequence[Tokens]:
        """The pieces of what is given as JSON; none if it can't be read, or forces no text."""
        try:
            value = json.loads(given) if len(given) <= MAX_SCHEMA else None
        except (ValueError, RecursionError):
            value = None
        if kind == "choice":
            # The first one is taken for the likeliest, as of an enum.
            return self._split([Piece(text, opens=True) for text in reversed(value or ())])
        read = schema_items if kind == "schema" else tag_items
        room = self.room * CHARACTERS
        return self._split(
            piece
            for style in reversed(self.styles)
            for piece in pieces_of(read(value, style), room)
        )

    def _split(self, pieces: Iterable[Piece]) -> Sequence[Tokens]:
        """The pieces' tokens, each piece by itself and once."""
        tokenizer: Any = self.tokenizer
        assert tokenizer is not None
        chosen = list(dict.fromkeys(pieces))
        texts = [piece.text for piece in chosen]
        if texts and getattr(tokenizer, "is_fast", False):
            # One call for all: the step of other requests waits for it.
            found = tokenizer(texts, add_special_tokens=False)["input_ids"]
        else:
            found = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return [
            Tokens(tuple(tokens), piece.opens) for tokens, piece in zip(found, chosen, strict=True)
        ]


def _choices(params: StructuredOutputsParams) -> list[str] | None:
    """The texts among which an answer is chosen, if it is."""
    grammar = params.grammar
    if params.choice is None and grammar is not None and len(grammar) <= MAX_SCHEMA:
        return choices_in(grammar)
    choices: list[str] | None = params.choice
    return choices


def styles_of(*, any_whitespace: bool) -> tuple[Style, ...]:
    """The layouts of JSON that a grammar permits, the likeliest one first."""
    return (SPACED, COMPACT, INDENTED) if any_whitespace else (COMPACT,)
