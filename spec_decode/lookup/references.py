"""References of requests: texts that their answers are likely to hold, as tokens."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from vllm_graft.base.log import warning_once
from vllm_graft.base.options import flag
from vllm_graft.base.values import reason_of, shown
from vllm_graft.spec_decode.lookup.schema_text import (
    COMPACT,
    INDENTED,
    SPACED,
    Piece,
    Style,
    Work,
    pieces_of,
    schema_items,
    tag_items,
)
from vllm_graft.spec_decode.trees.text_state import BORDER, KEY, NONE, Reference

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.states import RequestState

    from vllm_graft.base.metric import Numbers


class Tokens(NamedTuple):
    """The int32 tokens of a piece of text, and whether it stands at the beginning of an answer."""

    tokens: Sequence[int]
    opens: bool


class Split(NamedTuple):
    """The pieces of a text that have room, likeliest first, and whether one was left out."""

    pieces: Sequence[Tokens] = ()
    is_cut: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(_OBJECT + 4 * len(each.tokens) for each in self.pieces) + _OBJECT


_OBJECT = 256
"""Host bytes of a piece beside its tokens, and of an entry."""


class Wrong(NamedTuple):
    """A prediction that can't be used, and the sentence on why not and what to send instead."""

    reason: str


class Predicted(NamedTuple):
    """A prediction that can be used: a text or token ids, and whether some of it was left out."""

    given: str | list[int]
    is_cut: bool


def prediction_of(params: SamplingParams, vocab_size: int, room: int) -> Predicted | Wrong | None:
    """A request's prediction, of which at most `room` ids are looked at; None for none."""
    given = (params.extra_args or {}).get(KEY)
    if given is None or given in ("", []):
        return None
    if isinstance(given, str):
        return Predicted(given, is_cut=False)
    if not isinstance(given, list):
        return Wrong(f"it is a {type(given).__name__}: send a text, or a list of token ids.")
    kept = given[:room]
    wrong = (each for each in kept if type(each) is not int or not 0 <= each < vocab_size)
    if (first := next(wrong, None)) is not None:
        # What is no number may be as long as a request.
        said = shown(first) if type(first) is int else f"a {type(first).__name__}"
        return Wrong(f"{said} in it is no token id, which are integers from 0 to {vocab_size - 1}.")
    return Predicted(kept, is_cut=len(kept) < len(given))


class UnreadPredictions:
    """A `TextWatch` of an engine without n-grams, or without room for references: it counts."""

    def __init__(self) -> None:
        self.count = 0

    def attach(self, req_states: RequestState) -> None:
        """Do nothing: texts are not read."""

    def begin(self, req_index: int, request: NewRequestData) -> None:
        params = request.sampling_params
        if params is not None and KEY in (params.extra_args or {}):
            self.count += 1
            warning_once(
                f"a request's {KEY} is not used: set {flag('tree', 'ngram')}, with room for a "
                "reference, or drop it."
            )

    def numbers(self) -> Numbers:
        return {"reference_declines": {"off": self.count}}


MAX_SCHEMA = 1 << 16
"""Characters of a schema that is read."""

MAX_READ = 8192
"""Tokens that are made of a text, however much room there is. Longer predictions come as tokens."""

CHARACTERS = 16
"""Characters that are taken for a token at most, before there are tokens."""

_LIKELY = 4
"""Characters that a token has in most texts."""

_ROUNDS = 4
"""Calls of the tokenizer in which there is room for what fits: each fills most of what is left."""

CACHE_BYTES = 16 << 20
"""Host bytes in which tokens of schemas and choices are kept."""

_LITERAL = r'"(?:[^"\\\n]|\\.)*"'
_CHOICE = re.compile(rf"\s*root\s*::=\s*{_LITERAL}(?:\s*\|\s*{_LITERAL})*\s*")


class Tokenizer(Protocol):
    """The common part of vLLM's tokenizers."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


class Found(NamedTuple):
    """Known text of an answer, by one of the `REFERENCE_SOURCES`."""

    source: str
    split: Split


class References:
    """Makes the reference of each new request: a function of its parameters and its prompt.

    It reads no more of a request than a reference has room for, and does no more work than
    `MAX_SCHEMA`, `MAX_VALUES` and `MAX_READ` permit, whatever the request holds. It counts so many
    tokens of the prompt's end (`opening`) before what opens an answer, so that a match is found
    where the answer begins. Of the layouts of JSON the likeliest stands first."""

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
        from cachetools import LRUCache  # vLLM brings it.

        self.vocab_size, self.styles = vocab_size, tuple(styles)
        self._read = min(room, MAX_READ)
        self.cache = LRUCache[bytes, Split](CACHE_BYTES, lambda split: split.num_bytes)
        """What was made of texts, by a hash: no text of a request is kept."""

    def of(self, params: SamplingParams | None, prompt: Sequence[int] | None) -> Reference:
        """The reference of a request; empty if it has none, or no prompt that is tokens. What is
        likelier stands behind: there the last of equal matches is found."""
        if params is None:
            return NONE
        declines: list[str] = []
        try:
            found = [
                self._predicted(params, declines),
                self._forced(params.structured_outputs, declines),
            ]
            made = [each for each in found if each is not None]
            if not made:
                return Reference(declines=tuple(declines)) if declines else NONE
            return self._joined(made, list((prompt or ())[-self.opening :]), declines)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # A tokenizer refuses some texts, such as half of a surrogate pair. One in Rust may
            # panic, and a panic is no Exception. The request is served without a reference.
            warning_once(f"a request has no reference: {reason_of(error)}", most=1)
            return Reference(declines=("error",))

    def _joined(self, found: list[Found], opening: list[int], declines: list[str]) -> Reference:
        """Pieces from the likeliest on as long as there is room, the likeliest at the end."""
        pieces: list[array[int]] = []
        counts: dict[str, int] = {}
        left, is_cut = self.room, any(each.split.is_cut for each in found)
        for source, split in found:
            for piece in split.pieces:
                before = opening if piece.opens else []
                room = left - len(before)
                # Of a prediction the beginning is of use, of another piece a part is not.
                fits = len(piece.tokens) if source != "prediction" else 1
                if room < fits:
                    is_cut = True
                    continue
                kept = piece.tokens[:room]
                is_cut = is_cut or len(kept) < len(piece.tokens)
                counts[source] = counts.get(source, 0) + len(kept)
                pieces.append(array("i", itertools.chain(before, kept)))
                left = room - len(kept) - 1
        row = array("i")
        for tokens in reversed(pieces):
            if row:
                row.append(BORDER)
            row.extend(tokens)
        return Reference(row, counts, (*declines, *(["cut"] if is_cut else [])))

    def _predicted(self, params: SamplingParams, declines: list[str]) -> Found | None:
        found = prediction_of(params, self.vocab_size, self.room)
        if isinstance(found, Wrong):
            declines.append("wrong_type")
            warning_once(f"a request's {KEY} is not used: {found.reason}", most=1)
            return None
        if found is None:
            return None
        if isinstance(found.given, list):
            tokens = Tokens(array("i", found.given), opens=True)
            return Found("prediction", Split([tokens], found.is_cut))
        if not self._has_tokenizer(declines):
            return None
        return Found("prediction", self._beginning(found.given))

    def _beginning(self, text: str) -> Split:
        """The first tokens of a text, of which no more is read than they take."""
        size, most = _LIKELY * self._read, CHARACTERS * self._read
        (tokens,) = self._encode([text[:size]])
        while len(tokens) < self._read and size < min(most, len(text)):
            # It goes on as it began, or nearly.
            size = min(most, size + max(size, size * self._read // max(1, len(tokens))) // 2)
            (tokens,) = self._encode([text[:size]])
        is_cut = size < len(text) or len(tokens) > self._read
        return Split([Tokens(array("i", tokens[: self._read]), opens=True)], is_cut)

    def _forced(self, params: StructuredOutputsParams | None, declines: list[str]) -> Found | None:
        """Text that structured output forces of an answer, if it is of a kind that we can read."""
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
        if not self._has_tokenizer(declines):
            return None
        split = self._known(kind, _short(given))
        if not split.pieces:
            declines.append("unreadable")
            return None
        return Found("choice" if kind == "choice" else "schema", split)

    def _has_tokenizer(self, declines: list[str]) -> bool:
        if self.tokenizer is None:
            declines.append("no_tokenizer")
        return self.tokenizer is not None

    def _known(self, kind: str, given: str | None) -> Split:
        """The tokens of what is given as JSON; none if it can't be read, or forces no text."""
        if given is None:
            return Split()
        key = hashlib.blake2b(f"{kind} {given}".encode("utf-8", "surrogatepass")).digest()
        if (split := self.cache.get(key)) is None:
            split = self._split(self._pieces(kind, given))
            with contextlib.suppress(ValueError):  # It is larger than the whole cache.
                self.cache[key] = split
        return split

    def _pieces(self, kind: str, given: str) -> Iterator[Piece]:
        """The pieces of what is given as JSON, the likeliest first."""
        try:
            value = json.loads(given)
        except (ValueError, RecursionError):
            return
        if kind == "choice":
            # The first one is taken for the likeliest, as of an enum.
            yield from (Piece(text, opens=True) for text in value)
            return
        read, work = schema_items if kind == "schema" else tag_items, Work()
        for style in self.styles:
            yield from reversed(pieces_of(read(value, style, work), CHARACTERS * self._read))

    def _split(self, pieces: Iterator[Piece]) -> Split:
        """The pieces' tokens, each piece by itself and once, as long as there is room."""
        made: list[Tokens] = []
        seen: set[Piece] = set()
        left, is_cut = self._read, False
        for _ in range(_ROUNDS):
            batch = _batch(pieces, seen, _LIKELY * left)
            for tokens, piece in zip(self._encode([p.text for p in batch]), batch, strict=True):
                if len(tokens) <= left:
                    made.append(Tokens(array("i", tokens), piece.opens))
                    left -= len(tokens)
                else:
                    is_cut = True
        return Split(made, is_cut or next(pieces, None) is not None)

    def _encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        return encoded(self.tokenizer, texts)


def encoded(tokenizer: Any, texts: Sequence[str]) -> Sequence[Sequence[int]]:
    """The tokens of each text."""
    if texts and getattr(tokenizer, "is_fast", False):
        # One call for all, in which other threads may run.
        found: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
        return found
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def _batch(pieces: Iterator[Piece], seen: set[Piece], characters: int) -> list[Piece]:
    """The next pieces that were not seen, of about so many characters."""
    batch: list[Piece] = []
    while characters > 0 and (piece := next(pieces, None)) is not None:
        if piece not in seen:
            seen.add(piece)
            batch.append(piece)
            characters -= len(piece.text)
    return batch


def _short(given: Any) -> str | None:
    """A given value as JSON, if it is short enough to be read; a text is JSON already."""
    if isinstance(given, str):
        return given if len(given) <= MAX_SCHEMA else None
    text, size = [], 0
    for part in json.JSONEncoder().iterencode(given):
        text.append(part)
        size += len(part)
        if size > MAX_SCHEMA:
            return None
    return "".join(text)


def _choices(params: StructuredOutputsParams) -> list[str] | None:
    grammar = params.grammar
    if params.choice is None and grammar is not None and len(grammar) <= MAX_SCHEMA:
        return choices_in(grammar)
    choices: list[str] | None = params.choice
    return choices


def choices_in(grammar: str) -> list[str] | None:
    """The texts that a grammar of one rule permits; None if it is another kind of grammar. With
    xgrammar a request's ``choice`` arrives as such a grammar, with literals as in JSON."""
    if not _CHOICE.fullmatch(grammar):
        return None
    try:
        return [json.loads(literal) for literal in re.findall(_LITERAL, grammar)]
    except ValueError:
        return None


def styles_of(*, any_whitespace: bool) -> tuple[Style, ...]:
    """The layouts of JSON that a grammar permits, the likeliest one first."""
    return (SPACED, COMPACT, INDENTED) if any_whitespace else (COMPACT,)
