"""What a structural tag forces: the marks of a model's own format around JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vllm_graft.spec_decode.lookup.forced_text import Choice, Item
from vllm_graft.spec_decode.lookup.schema_text import (
    MAX_ALTERNATIVES,
    MAX_DEPTH,
    Style,
    Work,
    schema_items,
)


def tag_items(tag: Any, style: Style, work: Work | None = None) -> list[Item]:
    """What texts that fit a structural tag of xgrammar have in common, in their order.

    Args:
        tag: the tag, as Python values: ``{"type": "structural_tag", "format": ...}``, or the older
            form with ``structures``, each with a ``begin``, a ``schema`` and an ``end``.
        style: the layout of JSON.
        work: what reading it may cost. What costs more is a gap.
    """
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
