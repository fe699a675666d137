"""Text that a JSON schema, or a structural tag around JSON, forces of the answers that fit it."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

CONTEXT = 1
"""Known texts that stand before each alternative but the first: enough to tell where it belongs."""

_WORK = 4
"""Characters that are handled for each one that there is room for."""


class Choice(NamedTuple):
    """Alternatives, of which one comes; the first is taken to be the likeliest."""

    alternatives: Sequence[Sequence["Item"]]


Item = str | Choice | None
"""A known text, one of several, or a gap: a text that is not known."""


class Piece(NamedTuple):
    """A stretch of known text, and whether it opens the whole."""

    text: str
    opens: bool


class _Full(Exception):
    """There is no room for another piece."""


class _Open:
    """A piece that may go on: known texts, and whether the first of them opens the whole."""

    def __init__(self, parts: list[str], *, opens: bool) -> None:
        self.parts, self.opens = parts, opens

    def tail(self) -> "_Open":
        kept = self.parts[-CONTEXT:]
        return _Open(kept, opens=self.opens and len(kept) == len(self.parts))


class _Pieces:
    def __init__(self, room: int) -> None:
        self.room = room
        self.work = _WORK * room
        self.found: dict[Piece, None] = {}

    def spend(self, characters: int) -> None:
        """Stop where more characters were handled than pieces are worth."""
        self.work -= 1 + characters
        if self.work < 0:
            raise _Full

    def close(self, piece: _Open, behind: str = "") -> None:
        """Keep a piece that does not go on."""
        text = "".join(piece.parts) + behind
        self.spend(len(text))
        made = Piece(text, piece.opens)
        if not text or made in self.found:
            return
        if len(text) > self.room:
            raise _Full
        self.room -= len(text)
        self.found[made] = None

    def walk(self, items: Sequence[Item], piece: _Open, behind: str) -> _Open:
        """Go through items from an open piece on, which grows; return the one that is open at their
        end. The known text after them is `behind`."""
        for number, item in enumerate(items):
            if item is None:
                self.close(piece)
                piece = _Open([], opens=False)
            elif isinstance(item, str):
                self.spend(len(item))
                piece.parts.append(item)
            else:
                after = known(items, number + 1, behind)
                self.spend(len(after))
                first, *others = item.alternatives
                for other in others:
                    self.close(self.walk(other, piece.tail(), after), after)
                piece = self.walk(first, piece, after)
        return piece


def known(items: Sequence[Item], start: int, behind: str) -> str:
    """The text from an item on that is known, `behind` what comes after all items."""
    parts: list[str] = []
    for place in range(start, len(items)):
        if not isinstance(item := items[place], str):
            return "".join(parts)
        parts.append(item)
    return "".join(parts) + behind


def pieces_of(items: Sequence[Item], room: int) -> list[Piece]:
    """The known stretches of a text, in its order, of at most `room` characters together. A stretch
    ends at a gap. Each further alternative of a `Choice` is a piece of its own, with the known text
    before it and behind it, and stands before the piece of the first."""
    pieces = _Pieces(room)
    with contextlib.suppress(_Full):
        pieces.close(pieces.walk(items, _Open([], opens=True), ""))
    return list(pieces.found)


MAX_DEPTH = 16
"""Values within values that are followed."""

MAX_VALUES = 2000
"""Values that are read of a schema in all layouts together, alternatives and references again."""

_SMALL = 8
"""Keys that are copied, or steps of a path that are followed, for the work of a value."""

MAX_ALTERNATIVES = 16
"""Alternatives that are read of each choice."""

MAX_LITERAL = 400
"""Characters that a constant may have."""

_written = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""A constant as JSON; xgrammar permits those of objects and arrays in the compact layout alone."""

_SINGLE_TYPES = ("object", "array", "string", "boolean", "null", "number", "integer")


class Style(NamedTuple):
    """A layout of JSON, as by ``json.dumps`` with these separators and this indentation."""

    item: str
    key: str
    indent: int | None = None

    def line(self, level: int) -> str:
        """The text before a value of a container at a level, and before its end."""
        return "" if self.indent is None else "\n" + " " * (self.indent * level)


SPACED = Style(", ", ": ")
"""The default of ``json.dumps``, which most models write."""

COMPACT = Style(",", ":")
"""The only one where a grammar has no whitespace (``disable_any_whitespace``)."""

INDENTED = Style(",", ": ", 2)


class Work:
    """Work that may still be done, in values of a schema."""

    def __init__(self, left: int = MAX_VALUES) -> None:
        self.left = left

    def spend(self, amount: int = 1) -> bool:
        """Take some of it; say whether there was so much."""
        self.left -= amount
        return self.left >= 0


def schema_items(schema: Any, style: Style, work: Work | None = None) -> list[Item]:
    """The common items, in their order, of texts that fit a JSON schema, given as Python values.
    Properties come in the schema's order, which is that of the grammars of xgrammar and guidance,
    and all of them come. An array has one element. Strings and numbers that are free are gaps, and
    so is all that can't be read, or would cost more than `work`."""
    return _merged(_Reader(schema, style, work or Work()).value(schema, 0))


def _merged(items: Iterator[Item]) -> list[Item]:
    """The same items, without gaps that follow a gap."""
    found: list[Item] = []
    for item in items:
        if item is not None or not found or found[-1] is not None:
            found.append(item)
    return found


class _Reader:
    """Reads one schema; `root` is the whole, into which references point."""

    def __init__(self, root: Any, style: Style, work: Work) -> None:
        self.root, self.style, self.work = root, style, work
        self.depth = 0
        self._found: dict[str, Any] = {}
        self.followed: list[str] = []
        """References that are being read: one within itself is a gap."""

    def value(self, schema: Any, level: int) -> Iterator[Item]:
        """The items of a value in a container of so many levels."""
        left = self.work.spend()
        if not isinstance(schema, Mapping) or not left or self.depth >= MAX_DEPTH:
            yield None
            return
        self.depth += 1
        yield from self._known(schema, level)
        self.depth -= 1

    def _known(self, schema: Mapping[str, Any], level: int) -> Iterator[Item]:
        if "$ref" in schema:
            yield from self._reference(schema["$ref"], level)
        elif "const" in schema:
            yield from self._literal(schema["const"])
        elif isinstance(schema.get("enum"), list):
            yield from self._choice(map(self._literal, schema["enum"]))
        elif isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1:
            yield from self.value(self._joined(schema, "allOf", schema["allOf"][0]), level)
        elif (name := next((key for key in ("anyOf", "oneOf") if key in schema), None)) is not None:
            yield from self._alternatives(schema, name, level)
        else:
            yield from self._typed(schema, schema.get("type"), level)

    def _reference(self, name: Any, level: int) -> Iterator[Item]:
        if not isinstance(name, str) or name in self.followed:
            yield None
            return
        self.followed.append(name)
        if name not in self._found:
            path = name.split("/")
            # Each path is followed once.
            fits = self.work.spend(len(path) // _SMALL)
            self._found[name] = _pointed(self.root, path) if fits else None
        yield from self.value(self._found[name], level)
        self.followed.pop()

    def _alternatives(self, schema: Mapping[str, Any], name: str, level: int) -> Iterator[Item]:
        given = schema[name] if isinstance(schema[name], list) else []
        joined = (self._joined(schema, name, each) for each in given)
        yield from self._choice(self.value(each, level) for each in joined)

    def _choice(self, alternatives: Iterator[Iterator[Item]]) -> Iterator[Item]:
        read: list[list[Item]] = []
        for alternative in alternatives:
            if len(read) == MAX_ALTERNATIVES:
                break
            read.append(_merged(alternative))
        if len(read) == 1:
            yield from read[0]
        else:
            yield Choice(read) if read else None

    def _typed(self, schema: Mapping[str, Any], kind: Any, level: int) -> Iterator[Item]:
        if isinstance(kind, list):
            known = (each for each in kind[:MAX_ALTERNATIVES] if each in _SINGLE_TYPES)
            yield from self._choice(self._typed(schema, each, level) for each in known)
        elif kind == "object" or (kind is None and "properties" in schema):
            yield from self._object(schema, level)
        elif kind == "array" or (kind is None and ("items" in schema or "prefixItems" in schema)):
            yield from self._array(schema, level)
        elif kind == "string":
            yield from ('"', None, '"')
        elif kind == "boolean":
            yield Choice([["true"], ["false"]])
        else:
            yield "null" if kind == "null" else None

    def _object(self, schema: Mapping[str, Any], level: int) -> Iterator[Item]:
        given = schema.get("properties")
        members = (
            (_written(name) + self.style.key, value)
            for name, value in (given if isinstance(given, Mapping) else {}).items()
        )
        closed = schema.get("additionalProperties") is False
        yield from self._container("{}", members, level, is_empty=closed)

    def _array(self, schema: Mapping[str, Any], level: int) -> Iterator[Item]:
        first, rest = schema.get("prefixItems"), schema.get("items")
        members = first if isinstance(first, list) else []
        if not members and isinstance(rest, Mapping):
            members = [rest]
        closed = schema.get("maxItems") == 0
        yield from self._container("[]", (("", value) for value in members), level, is_empty=closed)

    def _literal(self, value: Any) -> Iterator[Item]:
        text = _written(value)
        # A long one costs as much as many short ones.
        self.work.spend(1 + len(text) // MAX_LITERAL)
        yield text if len(text) <= MAX_LITERAL else None

    def _container(
        self, ends: str, members: Iterator[tuple[str, Any]], level: int, *, is_empty: bool
    ) -> Iterator[Item]:
        """Members of an object or an array, each with what stands before its value."""
        before = ends[0]
        for name, value in members:
            yield before + self.style.line(level + 1) + name
            yield from self.value(value, level + 1)
            before = self.style.item
            if self.work.left < 0:
                return
        if before == ends[0]:
            yield from ((ends,) if is_empty else (before, None, ends[1]))
        else:
            yield self.style.line(level) + ends[1]

    def _joined(self, schema: Mapping[str, Any], name: str, other: Any) -> Any:
        """A schema with one of the schemas below a key in the place of this key."""
        if not isinstance(other, Mapping):
            return other
        found = (each.get("properties") for each in (schema, other))
        properties = [each for each in found if isinstance(each, Mapping)]
        copied = sum(map(len, (schema, other, *properties)))
        if not self.work.spend(copied // _SMALL):
            return None
        made = {**schema, **other}
        if name not in other:
            del made[name]
        if len(properties) > 1:
            mine, theirs = properties
            made["properties"] = {**mine, **theirs}
        return made


def _pointed(root: Any, path: Sequence[str]) -> Any:
    """The target of a reference within the document; None if it points elsewhere."""
    head, *steps = path
    if head != "#":
        return None
    for step in steps:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(root, Mapping):
            root = root.get(key)
        elif isinstance(root, list) and key.isdecimal() and int(key) < len(root):
            root = root[int(key)]
        else:
            return None
    return root


def tag_items(tag: Any, style: Style, work: Work | None = None) -> list[Item]:
    """The common items, in their order, of texts that fit a structural tag of xgrammar. The tag is
    ``{"type": "structural_tag", "format": ...}``, or of the older form with ``structures``, each
    with a ``begin``, a ``schema`` and an ``end``. What costs more than `work` is a gap."""
    work = work or Work()
    if not isinstance(tag, Mapping):
        return [None]
    if isinstance(old := tag.get("structures"), list):
        made = [
            {**each, "content": {"type": "json_schema", "json_schema": each.get("schema")}}
            for each in old
            if isinstance(each, Mapping)
        ]
        return _choice([list(_tag(each, style, work, 0)) for each in made[:MAX_ALTERNATIVES]])
    return list(_format(tag.get("format"), style, work, 0))


def _choice(read: list[list[Item]]) -> list[Item]:
    """The alternatives, behind a gap: what comes before a tag is free, or another tag."""
    return [None, Choice(read) if read else None]


def _format(given: Any, style: Style, work: Work, depth: int) -> Iterator[Item]:
    if not isinstance(given, Mapping) or depth == MAX_DEPTH or not work.spend():
        yield None
        return
    kind = given.get("type")
    if kind == "const_string":
        yield from _text(given.get("value"))
    elif kind == "json_schema" and given.get("style", "json") == "json":
        yield from schema_items(given.get("json_schema"), style, work)
    elif kind == "tag":
        yield from _tag(given, style, work, depth)
    elif kind in ("optional", "plus", "star"):
        yield from _format(given.get("content"), style, work, depth + 1)
    elif kind == "sequence" and isinstance(given.get("elements"), list):
        for each in given["elements"][:MAX_ALTERNATIVES]:
            yield from _format(each, style, work, depth + 1)
    elif kind == "or" and isinstance(given.get("elements"), list):
        yield from _several(given["elements"], style, work, depth)
    elif kind in ("tags_with_separator", "triggered_tags") and isinstance(given.get("tags"), list):
        if kind == "triggered_tags":
            # Free text comes before.
            yield None
        yield from _several(given["tags"], style, work, depth)
        yield None
    else:
        yield None


def _several(given: list[Any], style: Style, work: Work, depth: int) -> Iterator[Item]:
    read = [list(_format(each, style, work, depth + 1)) for each in given[:MAX_ALTERNATIVES]]
    yield Choice(read) if read else None


def _tag(given: Mapping[str, Any], style: Style, work: Work, depth: int) -> Iterator[Item]:
    yield from _text(given.get("begin"))
    yield from _format(given.get("content"), style, work, depth + 1)
    yield from _text(given.get("end"))


def _text(given: Any) -> Iterator[Item]:
    """A known text; of several that may stand in a place, the first."""
    one = given[0] if isinstance(given, list) and given else given
    yield one if isinstance(one, str) else None
