"""Keys of ``additional_config`` that were meant for us and stand where nobody reads them.

vLLM checks none of its keys there, and shares them among plugins: those of hardware platforms have
their own. Whoever asked for a part in another spelling would get stock vLLM without a word. So what
can only be ours is refused; what may be another plugin's is warned about.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from vllm_graft.base.decision import PRESETS
from vllm_graft.base.errors import ConfigError
from vllm_graft.base.log import warning_once
from vllm_graft.base.options import FLAG, KEY
from vllm_graft.base.values import below, several, shown
from vllm_graft.config import GraftConfig
from vllm_graft.hicache.config.cache_config import CONNECTOR, HiCacheConfig
from vllm_graft.hicache.config.connector_options import FLAG as CONNECTOR_FLAG

_OPTION = FLAG.removesuffix(f".{KEY}")
_HICACHE = "hicache"
_OLD = {"eagle": "tree"}
"""Names that parts had before."""

_CLOSE = 0.8
_SEPARATORS = "._-/: "
_BEFORE = re.compile(r"^[\s-]*(additional[_-]config[._-])?(vllm[._-])?")
_SHORT = 80


def refuse_misplaced(additional: object) -> None:
    """Look at every key but ``graft`` itself.

    Raises:
        ConfigError: with a line for each key that can only be ours, and how to write it.
    """
    if not isinstance(additional, Mapping):
        return
    problems = []
    for key, value in additional.items():
        if not isinstance(key, str) or key == KEY:
            continue
        if can_only_be_ours(key, value):
            problems.append(f"{FLAG}: {_how_to_write(key, value)}")
        elif _name_of(key) is not None or _is_option(key):
            warning_once(
                f"{below(_OPTION, key)} is not read by vllm-graft, whose keys are those of {FLAG}: "
                "if it was meant to be, nothing of it is active"
            )
    if problems:
        raise ConfigError(several(problems))


def can_only_be_ours(key: str, value: object) -> bool:
    """Whether no other plugin would have such a key, which is not ``graft``.

    Keys that begin with ``graft`` are, and one nearly so above the name of a preset. So are
    ``eagle.topk``, and ``eagle`` (or nearly so) above a mapping most of whose keys are those of the
    part.
    """
    text = _normal(key)
    if text.startswith(KEY):
        return True
    head, dot, rest = text.partition(".")
    if dot and rest in _fields(head):
        return True
    if isinstance(value, str) and value in PRESETS and _name_of(key) == KEY:
        return True
    if not isinstance(value, Mapping) or not value or (name := _name_of(key)) is None:
        return False
    known = [*_parts()] if name == KEY else _fields(name)
    ours = sum(isinstance(one, str) and _heads(one, known) for one in value)
    return 2 * ours >= len(value)


def _parts() -> dict[str, type[Any]]:
    """What can stand for a part: those below ``graft``, and the connector's configuration."""
    parts = {name: _model(field.annotation) for name, field in GraftConfig.model_fields.items()}
    old = {name: parts[now] for name, now in _OLD.items()}
    return {**parts, **old, _HICACHE: HiCacheConfig}


def _model(annotation: Any) -> type[Any]:
    """``TreeConfig`` of ``TreeConfig | None``."""
    model: type[Any] = next(one for one in annotation.__args__ if one is not type(None))
    return model


def _fields(part: str) -> list[str]:
    model = _parts().get(part)
    return [] if model is None else list(model.model_fields)


def _is_option(key: str) -> bool:
    """Whether a key is that of an option of a part below ``graft``, of a name of several words."""
    option = _normal(key).replace("-", "_")
    return "_" in option and any(option in _fields(name) for name in GraftConfig.model_fields)


def _normal(key: str) -> str:
    """A key without capitals, and without what somebody may have put before it."""
    return _BEFORE.sub("", key.casefold()).strip()


def _heads(key: str, known: Iterable[str]) -> bool:
    """Whether a key, or what stands before its first dot, is a known one or nearly so."""
    head = _normal(key).partition(".")[0].replace("-", "_")
    return bool(difflib.get_close_matches(head, known, n=1, cutoff=_CLOSE))


def _name_of(key: str) -> str | None:
    """The part that a key, or all before ``_topk`` and the like, is named after, or nearly so."""
    text = _normal(key)
    names = [*_parts(), KEY]
    for name in names:
        rest = text.removeprefix(name)
        if rest != text and rest.lstrip(_SEPARATORS).replace("-", "_") in ["", *_fields(name)]:
            return name
    return next(iter(difflib.get_close_matches(text, names, n=1, cutoff=_CLOSE)), None)


def _how_to_write(key: str, value: object) -> str:
    said = f"the key {shown(key)} of {_OPTION} is not read: "
    keys = _path(key)
    if keys[:1] == [_HICACHE]:
        return (
            f"{said}the host KV cache is a KV connector, so write --kv-transfer-config "
            f'\'{{"kv_connector": "{CONNECTOR}", "kv_role": "kv_both", '
            f'"kv_connector_extra_config": {{...}}}}\' and its keys below {CONNECTOR_FLAG}.'
        )
    if not keys and isinstance(value, Mapping):
        value = {_OLD.get(name, name): section for name, section in value.items()}
    nested = _json(value)
    for name in reversed([KEY, *(_OLD.get(key, key) for key in keys)]):
        nested = f"{{{json.dumps(name)}: {nested}}}"
    return f"{said}write {_OPTION} '{nested}'."


def _path(key: str) -> list[str]:
    """The keys below ``graft`` that one key stands for: ``graft_eagle.topk`` for two of them."""
    rest = _normal(key)
    if rest.startswith(KEY):
        rest = rest.removeprefix(KEY).lstrip(_SEPARATORS)
    elif _name_of(key) == KEY:
        rest = ""
    for name in _parts():
        if rest.startswith(name):
            option = rest.removeprefix(name).lstrip(_SEPARATORS).replace("-", "_")
            return [name, option] if option else [name]
    if close := difflib.get_close_matches(rest, _parts(), n=1, cutoff=_CLOSE):
        return close
    option = rest.replace("-", "_")
    return [name for name in _parts() if option in _fields(name)][:1] + ([option] if option else [])


def _json(value: object) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return "..."
    return text if len(text) <= _SHORT else "..."
