"""The configuration: what stands under ``graft`` in vLLM's ``--additional-config``, and beside it.
vLLM checks no key there. A misspelt part must not mean stock vLLM without a word: what can only be
ours is refused, and what may be another plugin's is warned about."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from vllm_graft.base import decision
from vllm_graft.base.errors import ConfigError
from vllm_graft.base.log import warning_once
from vllm_graft.base.options import (
    FLAG,
    KEY,
    Section,
    flag,
    parse_section,
    section_type,
)
from vllm_graft.base.values import below, several, shown
from vllm_graft.graph_runners.vision.vision_config import VitConfig
from vllm_graft.hicache.config.cache_config import HiCacheConfig
from vllm_graft.learn.learn_config import LearnConfig
from vllm_graft.spec_decode.config.draft_config import DraftConfig
from vllm_graft.spec_decode.config.tree_config import TreeConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

HICACHE = (
    " The host KV cache is a KV connector: its keys stand in kv_connector_extra_config of "
    "--kv-transfer-config, whose kv_connector is HiCacheConnector."
)
"""What to say of keys of the host cache that stand among ours."""

HINTS = {
    "hicache": HICACHE,
    **{
        name: f" A preset stands in place of all keys: write {FLAG} {preset}."
        for name, preset in {each: each for each in decision.PRESETS}.items()
    },
}
"""What to say of keys that stand elsewhere."""


class GraftConfig(Section):
    """Everything under ``graft``; a part that is None is off."""

    tree: TreeConfig | None = None
    vit: VitConfig | None = None
    draft: DraftConfig | None = None
    learn: LearnConfig | None = None

    @classmethod
    def parse(cls, values: object) -> GraftConfig:
        """Validate what stands under ``graft``. Numbers may be strings of digits, as the dotted
        command line gives them. Raises `ConfigError` with a line for each wrong key: its full flag,
        the value, what is allowed."""
        if isinstance(values, str):
            _require_preset(values)
            return cls()
        if isinstance(values, Mapping):
            if (preset := values.get(decision.PRESET)) is not None:
                _require_preset(preset, decision.PRESET)
                _require_beside(values)
            others = (decision.NAME, decision.PRESET)
            given = {key: value for key, value in values.items() if key not in others}
            config = parse_section(cls, given, hints={**_hints(given), **HINTS})
            # A part is not named by what a preset may be given for it.
            return config if preset is None else config.model_copy(update=dict.fromkeys(LEFT))
        return parse_section(cls, values, hints=HINTS)

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> GraftConfig | None:
        """The configuration in ``vllm_config.additional_config``; None without a ``graft`` key."""
        additional = vllm_config.additional_config
        if not isinstance(additional, Mapping) or KEY not in additional:
            return None
        return cls.parse(additional[KEY])


def _hints(given: Iterable[object]) -> dict[str, str]:
    """What to say of keys that are a preset's misspelt, or belong into a part's section."""
    hints = {}
    for key in (key for key in given if isinstance(key, str)):
        if _near(_word(key), [decision.PRESET]):
            hints[key] = f" Did you mean {decision.PRESET!r}?"
        elif parts := [name for name in GraftConfig.model_fields if key in _SECTIONS[name]]:
            hints[key] = f" Did you mean {' or '.join(flag(name, key) for name in parts)}?"
    return hints


def read(vllm_config: VllmConfig) -> GraftConfig | None:
    """The configuration, as `GraftConfig.from_vllm`, after `refuse_misplaced`."""
    refuse_misplaced(vllm_config.additional_config)
    return GraftConfig.from_vllm(vllm_config)


def _require_preset(value: object, *path: str) -> None:
    if value not in decision.PRESETS:
        near = difflib.get_close_matches(str(value)[:80], decision.PRESETS, n=1)
        or_else = (
            "" if path else f", or a mapping with the keys {', '.join(GraftConfig.model_fields)}"
        )
        raise ConfigError(
            f"{below(FLAG, *path)}: {shown(value)} is no preset."
            f"{f' Did you mean {near[0]!r}?' if near else ''} "
            f"Allowed: {', '.join(decision.PRESETS)}{or_else}."
        )


LEFT: dict[str, tuple[str, ...]] = {"tree": ("memory",)}
"""Keys that a preset leaves to the user, by part: what requests may learn of each other."""


def left_to_user(values: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """What is asked for beside a preset of parts that it decides on; `values` are valid ones."""
    found = dict[str, dict[str, object]]()
    for name, given in _beside(values).items():
        section = getattr(GraftConfig.parse({name: given}), name)
        # What is false or null asks for nothing.
        if asked := {key: each for key, each in given.items() if getattr(section, key) is not None}:
            found[name] = asked
    return found


def _beside(values: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
    return {name: given for name in LEFT if isinstance(given := values.get(name), Mapping)}


def _require_beside(values: Mapping[str, object]) -> None:
    """Raise ConfigError for keys beside a preset, which decides on them."""
    given, others = _beside(values), list[str]()
    for name in (name for name in values if name in _DECIDED):
        keys = [key for key in given.get(name, ()) if key not in LEFT[name]]
        others += [flag(name, key) for key in keys] if given.get(name) else [flag(name)]
    if others:
        left = [flag(name, key) for name, keys in LEFT.items() for key in keys]
        raise ConfigError(
            f"{flag(decision.PRESET)} {values[decision.PRESET]} decides on {' and '.join(others)}: "
            "drop that, or drop the preset and name all parts. Beside a preset only "
            f"{' and '.join([flag(LearnConfig.NAME), *left])} may stand."
        )


_DECIDED = [name for name in GraftConfig.model_fields if name != LearnConfig.NAME]
"""What a preset decides on."""

_OPTION = FLAG.removesuffix(f".{KEY}")
_BEFORE = re.compile(r"^(additional_config_)?(vllm_)?")
_SECTIONS = {
    name: [*model.model_fields]
    for name, field in GraftConfig.model_fields.items()
    if (model := section_type(field.annotation)) is not None
} | {"hicache": [*HiCacheConfig.model_fields]}
_PATHS: dict[str, tuple[str, ...]] = {name: (name,) for name in _SECTIONS}
for _name, _keys in _SECTIONS.items():
    _PATHS |= {f"{_name}_{key}": (_name, key) for key in _keys}
    _PATHS |= {key: (_name, key) for key in _keys if "_" in key and _name != "hicache"}
"""Where a key stands below ``graft``, by its name in one word."""


def refuse_misplaced(additional: object) -> None:
    """Raise ConfigError, with a line for each key beside ``graft`` that can only be ours."""
    problems = []
    for key, value in additional.items() if isinstance(additional, Mapping) else ():
        if not isinstance(key, str) or key == KEY or (path := _meant(key)) is None:
            continue
        if can_only_be_ours(key, value):
            to = HICACHE if path[:1] == ("hicache",) else f" Write {flag(*path)}."
            problems.append(f"{FLAG}: the key {shown(key)} of {_OPTION} is not read.{to}")
        else:
            warning_once(
                f"{below(_OPTION, key)} is not read by vllm-graft, whose keys are those of {FLAG}: "
                "if it was meant to be, nothing of it is active"
            )
    if problems:
        raise ConfigError(several(problems))


def can_only_be_ours(key: str, value: object) -> bool:
    """Whether no other plugin would have such a key: its name and most that it holds are ours."""
    path, word = _meant(key), _word(key)
    if path is None or word.startswith(KEY):
        return path is not None
    if path == () and isinstance(value, str):
        return value in decision.PRESETS
    if len(path) == 2 and "." in key and word != path[1]:
        return True
    known = _SECTIONS[path[0]] if path else [*_SECTIONS]
    held = [*value] if isinstance(value, Mapping) else []
    ours = sum(
        isinstance(one, str) and _near(_word(one.split(".")[0]), known) != [] for one in held
    )
    return bool(held) and 2 * ours >= len(held)


def _meant(key: str) -> tuple[str, ...] | None:
    """The keys below ``graft`` that a key stands for; none of them for ``graft`` itself."""
    word = _word(key)
    rest = word.removeprefix(KEY).strip("_")
    if rest in _PATHS:
        return _PATHS[rest]
    if name := _near(rest, [*_SECTIONS]):
        return (name[0],)
    return () if word.startswith(KEY) or _near(word, [KEY]) else None


def _word(key: str) -> str:
    """A key in one word of small letters, without what somebody may have put before it."""
    return _BEFORE.sub("", re.sub(r"[^a-z0-9]+", "_", key.casefold()).strip("_"))


def _near(word: str, known: list[str]) -> list[str]:
    return difflib.get_close_matches(word, known, n=1, cutoff=0.8)
