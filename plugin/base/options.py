"""What sections of the configuration are made of, and how they are read and explained. Everything
that a user configures goes through `parse`, the options of third parties included."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, StringConstraints
from pydantic import ValidationError as PydanticError

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.values import MAX_LINES, below, several, shown

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

KEY = "graft"
FLAG = f"--additional-config.{KEY}"

MAX_DEPTH = 16
"""Lists and mappings within each other."""

MAX_TEXT = 4096
"""Characters of a text; no path of the system is longer."""

MAX_INTEGER = 2**63 - 1

_SIZE = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?|\.[0-9]{1,20})\s*([A-Za-z]*)\s*")


def _not_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("true and false are not numbers")
    return value


def _size(value: object) -> object:
    if not isinstance(value, str):
        return _not_bool(value)
    match = _SIZE.fullmatch(value)
    unit = ByteSize.byte_sizes.get(match[2].lower() or "b") if match else None
    if match is None or unit is None:
        raise ValueError('say a number of bytes, or one with a unit, as in "64GiB"')
    number = int(match[1]) if match[1].isdigit() else float(match[1])
    size = number * int(unit) if unit == int(unit) else number * unit
    if size > MAX_INTEGER:
        raise ValueError("it is too large for a size")
    return int(size)


def truth(value: object) -> object:
    """``True`` or ``False`` for one of them and for the words ``true`` and ``false`` of a command,
    in any case; every other value as it is."""
    word = value.lower() if isinstance(value, str) else None
    return {"true": True, "false": False}.get(word or "", value)


def _switch(value: object) -> object:
    found = truth(value)
    if not isinstance(found, bool):
        raise ValueError("say true or false")
    return found


Switch = Annotated[bool, BeforeValidator(_switch)]
"""True or false. Pydantic alone would take ``"yes"``, ``"off"`` and 1 as well."""

Count = Annotated[int, BeforeValidator(_not_bool)]
Number = Annotated[float, BeforeValidator(_not_bool)]
Bytes = Annotated[ByteSize, BeforeValidator(_size)]
"""A number of bytes, or a text like ``"64GiB"``."""

EntryName = Annotated[str, StringConstraints(min_length=1)]


class Section(BaseModel):
    """Base of every section's model: frozen, hashable, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


SectionT = TypeVar("SectionT", bound=Section)


def flag(*path: str | int) -> str:
    """The command-line flag of a key: ``flag("tree", "topk")``."""
    return below(FLAG, *path)


class GraftSection(Section):
    """Base of the sections below ``graft``; `NAME` is the section's key."""

    NAME: ClassVar[str]

    @classmethod
    def from_vllm(cls, vllm_config: Any) -> Self | None:
        """The section of ``vllm_config.additional_config``; None where it is not given. Raises
        `ConfigError` for a wrong key or value."""
        additional = vllm_config.additional_config
        sections = additional.get(KEY) if isinstance(additional, Mapping) else None
        if not isinstance(sections, Mapping) or sections.get(cls.NAME) is None:
            return None
        return parse_section(cls, sections[cls.NAME], cls.NAME)


def with_section(vllm_config: Any, name: str, **values: object) -> None:
    """Set keys of a section that ``vllm_config.additional_config`` has. The user's own mapping is
    not changed, because another engine may be made of it."""
    additional = vllm_config.additional_config
    sections = additional[KEY]
    section = {**sections[name], **values}
    vllm_config.additional_config = {**additional, KEY: {**sections, name: section}}


def without_section(vllm_config: Any, name: str) -> None:
    """Take a section out of ``vllm_config.additional_config``, as `with_section` does."""
    additional = vllm_config.additional_config
    sections = {key: each for key, each in additional[KEY].items() if key != name}
    vllm_config.additional_config = {**additional, KEY: sections}


def parse_section(
    model: type[SectionT], values: object, *path: str, hints: Mapping[str, str] | None = None
) -> SectionT:
    """Validate what stands under ``path`` below :data:`FLAG`; see `parse`."""
    return parse(model, values, flag(*path), hints)


def parse(
    model: type[SectionT], values: object, at: str, hints: Mapping[str, str] | None = None
) -> SectionT:
    """Validate a section, or the options of anything else that is configured.

    Numbers may be strings of digits, as the dotted command line gives them. Raises `ConfigError`
    with a line for each wrong key: its full flag, the value, what is allowed. `values`: the values
    that were given, a mapping if they are right. `at`: full flag of ``values``. `hints`: what to
    say of a key that is unknown here, instead of the nearest known one."""
    require_plain(values, at)
    try:
        return model.model_validate(values)
    except PydanticError as error:
        lines = [_explain(model, details, at, hints or {}) for details in error.errors()]
        raise ConfigError(several(lines)) from None


def require_plain(value: object, path: str) -> None:
    """Refuse what no JSON file could say, and what is too large to be meant. vLLM hashes its
    configuration as JSON and hands it to other processes: whatever else stands in it would fail
    there, or come out as something else. A path (`pathlib`) is taken for its text. Raises
    `ConfigError` with a line for each value that is refused, below the full flag ``path``."""
    if problems := list(islice(_strange(value, path, 0), MAX_LINES + 1)):
        raise ConfigError(several(problems))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` with a leading blank, or the known names when none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(names) or 'none'}."


def section_type(annotation: Any) -> type[Section] | None:
    """``TreeConfig`` out of ``TreeConfig | None``; None where there is no section."""
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def _explain(model: type[Section], details: ErrorDetails, at: str, hints: Mapping[str, str]) -> str:
    inner, value = details["loc"], details["input"]
    name = below(at, *inner)
    if details["type"] == "extra_forbidden":
        known = _fields_at(model, inner[:-1])
        hint = hints.get(".".join(map(str, inner)))
        return f"{name}: unknown key.{hint or did_you_mean(str(inner[-1]), known)}"
    field = _fields_at(model, inner[:-1]).get(str(inner[-1])) if inner else None
    if details["type"] == "missing":
        example = (
            f", for example {json.dumps(field.examples[0])}" if field and field.examples else ""
        )
        return f"{name} is missing: give it{example}."
    context = details.get("ctx", {})
    reason = str(context["error"]) if "error" in context else details["msg"]
    return f"{name}: {shown(value)} is refused: {reason}.{_allowed(model, inner)}"


def _allowed(model: type[Section], path: tuple[str | int, ...]) -> str:
    """`` Allowed: 1 to 32.`` for a number, a model's keys for a section, else nothing."""
    if path and isinstance(path[-1], int):
        path = path[:-1]  # A member of a list: the list's own bounds are told.
    field = _fields_at(model, path[:-1]).get(str(path[-1])) if path else None
    if field and (bounds := bounds_of(field)):
        return f" Allowed: {bounds}."
    keys = _fields_at(model, path)
    return f" Allowed: a mapping with the keys {', '.join(keys)}." if keys else ""


def bounds_of(field: FieldInfo) -> str:
    """``1 to 32`` for a number with two bounds, else nothing."""
    low = [str(rule.ge) for rule in field.metadata if hasattr(rule, "ge")]
    low += [f"over {rule.gt}" for rule in field.metadata if hasattr(rule, "gt")]
    high = [rule.le for rule in field.metadata if hasattr(rule, "le")]
    return f"{low[0]} to {high[0]}" if low and high else ""


def _fields_at(model: type[Section], path: Iterable[str | int]) -> Mapping[str, FieldInfo]:
    """The fields of the section found at ``path``; none where there is no section."""
    for name in path:
        field = model.model_fields.get(str(name))
        inner = section_type(field.annotation) if field else None
        if inner is None:
            return {}
        model = inner
    return model.model_fields


def _strange(value: object, path: str, depth: int) -> Iterator[str]:
    if not isinstance(value, (dict, list, tuple)):
        if reason := _strange_scalar(value):
            yield f"{path}: {shown(value)} is refused: {reason}."
        return
    if depth == MAX_DEPTH:
        yield f"{path}: lists and mappings are nested more than {MAX_DEPTH} deep."
        return
    for key, member in value.items() if isinstance(value, dict) else enumerate(value):
        reason = _strange_text(key) if isinstance(key, str) else "a key is a text"
        if isinstance(value, dict) and reason:
            yield f"{path}: the key {shown(key)} is refused: {reason}."
        else:
            yield from _strange(member, below(path, key), depth + 1)


def _strange_scalar(value: object) -> str | None:
    if isinstance(value, (str, PurePath)):
        return _strange_text(str(value))
    if isinstance(value, int):  # Also true and false.
        return None if abs(value) <= MAX_INTEGER else "it is too large for a number"
    if isinstance(value, float):
        return None if math.isfinite(value) else "it is no finite number"
    if value is None:
        return None
    return f"a {type(value).__name__} is neither text, number, true, false, null, list nor mapping"


def _strange_text(text: str) -> str | None:
    if len(text) > MAX_TEXT:
        return f"it has {len(text)} characters, more than {MAX_TEXT}"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "it is no text in Unicode"
    return None


def target_of(vllm_config: Any) -> Any:
    """The target's model configuration, also in a configuration that vLLM derived for the draft."""
    speculative = vllm_config.speculative_config
    return getattr(speculative, "target_model_config", None) or vllm_config.model_config


def without(arguments: Sequence[str], *flags: str) -> list[str]:
    """The arguments without these flags, in any form, and without their values."""
    kept, dropped = [], False
    for each in arguments:
        if each.startswith("-"):
            dropped = each.replace("_", "-").partition("=")[0].partition(".")[0] in flags
        if not dropped:
            kept.append(each)
    return kept
