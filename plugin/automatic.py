"""``graft: auto`` and the other presets: every part that this model and this machine can run. When
vLLM asks the platform for its defaults, each part says what it would run, and the sections of the
parts that nothing rules out replace the preset. When the configuration is complete, a part that is
ruled out only now is taken off again. A part that the user named is not decided here."""

import copy
import functools
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

from vllm_graft.base.decision import (
    NAME,
    PRESET,
    SPECULATIVE,
    Decision,
    Preset,
    preset_in,
)
from vllm_graft.base.errors import ConfigError
from vllm_graft.base.log import info_once
from vllm_graft.base.options import FLAG, KEY, flag, with_section
from vllm_graft.base.part import Offer, Part
from vllm_graft.base.refusal import facts
from vllm_graft.base.version import __version__
from vllm_graft.config import LEFT, GraftConfig, left_to_user
from vllm_graft.parts import PARTS
from vllm_graft.seams.permission import refused, unfit

_FILLED_IN = (
    f"{SPECULATIVE}.num_speculative_tokens",
    f"{SPECULATIVE}.num_speculative_tokens_per_batch_size",
)
"""What parts fill in of vLLM's speculative config."""

_SIZES = (
    "compilation_config.cudagraph_capture_sizes",
    "compilation_config.max_cudagraph_capture_size",
)
_DERIVED = (*_SIZES, "scheduler_config.max_num_scheduled_tokens")
"""What vLLM derives from that before the configuration is complete."""


def decide(named: Container[str], vllm_config: Any) -> None:
    """Put the sections of all parts that can run in the place of a preset, if there is one.
    `named`: parts that the user asked for by name. `vllm_config`: a configuration that
    `vllm_graft.config.read` accepts; it is changed."""
    preset: Any = preset_in(vllm_config)
    if preset is None:
        return
    graft = vllm_config.additional_config[KEY]
    beside = {} if isinstance(graft, str) else dict(graft)
    given = left_to_user(beside)
    for key in (PRESET, *LEFT):
        beside.pop(key, None)
    free = [part for part in PARTS if part.name not in named]
    offers = {part.name: _offer(part, preset, vllm_config, given) for part in free}
    on = {name: offer for name, offer in offers.items() if isinstance(offer, Offer)}
    decided = Decision(
        preset=preset,
        on={name: offer.says for name, offer in on.items()},
        off={name: offer for name, offer in offers.items() if isinstance(offer, str) and offer},
        asked=[*given],
    )
    sections = {name: offer.section.model_dump(exclude_unset=True) for name, offer in on.items()}
    _write(vllm_config, decided, {**beside, **sections})
    asked = {part.name: part for part in free if part.name in on}
    before = {name: _fill_in(part, on[name], vllm_config) for name, part in asked.items()}
    with_section(vllm_config, NAME, before=before)


def settle(config: GraftConfig | None, vllm_config: Any) -> GraftConfig | None:
    """Take what the complete configuration rules out off both; return what is left of ``config``.
    Each decision is a line of the log. Raises `ConfigError` for a preset that was not decided."""
    if (preset := preset_in(vllm_config)) is not None:
        raise ConfigError(
            f"{FLAG} is {preset!r}, but vLLM did not ask this platform for its defaults, which is "
            "when presets are decided: name the parts instead."
        )
    decided = Decision.from_vllm(vllm_config)
    if config is None or decided is None or decided.settled:
        return config
    graft = vllm_config.additional_config[KEY]
    on, off, tried = dict(decided.on), dict(decided.off), decided.on
    for part in PARTS:
        section = part.section(config, vllm_config) if part.name in on else None
        if section is None:
            continue
        seams = part.seams(section, vllm_config)
        if reason := _ruled_out(part, section, vllm_config) or refused(seams, vllm_config):
            if part.name in decided.asked:
                raise ConfigError(_not_active(part, LEFT[part.name], reason))
            del on[part.name]
            off[part.name] = reason
            _restore(vllm_config, decided.before.get(part.name, {}))
    decided = decided.model_copy(update={"on": on, "off": off, "settled": True})
    dropped = {name for name in tried if name not in on}
    _write(vllm_config, decided, {name: graft[name] for name in graft if name not in dropped})
    if dropped:
        # With data parallelism trees may change their number, and vLLM's own drafts may not.
        vllm_config._maybe_disable_dynamic_sd_for_data_parallel()
    _log(decided)
    return config.model_copy(update=dict.fromkeys(dropped))


def _offer(
    part: Part, preset: Preset, vllm_config: Any, given: Mapping[str, Mapping[str, object]]
) -> Offer | str:
    """A part's offer with what the user gave for it, or why it is off. Raises `ConfigError` if it
    is off and the user gave something."""
    offer = part.automatic(preset, vllm_config)
    wanted = given.get(part.name)
    if wanted and isinstance(offer, Offer):
        values = {**offer.section.model_dump(exclude_unset=True), **wanted}
        says = f"{' and '.join(wanted)} as given, {offer.says}"
        offer = replace(offer, section=type(offer.section).model_validate(values), says=says)
    if isinstance(offer, Offer):
        offer = _unless_ruled_out(part, offer, vllm_config)
    if wanted and isinstance(offer, str):
        raise ConfigError(_not_active(part, wanted, offer))
    return offer


def _unless_ruled_out(part: Part, offer: Offer, vllm_config: Any) -> Offer | str:
    given = vllm_config
    if offer.speculative is not None:
        given = copy.copy(vllm_config)
        given.speculative_config = offer.speculative
    # The seams come last, as they are read from source files.
    seams = part.seams(offer.section, given)
    return _ruled_out(part, offer.section, given) or unfit(seams) or offer


def _not_active(part: Part, given: Iterable[str], reason: str) -> str:
    keys = " and ".join(flag(part.name, key) for key in given)
    return (
        f"{keys} is given beside {flag(PRESET)}, which leaves {part.name} off: "
        f"{reason or 'the model has nothing that it is for.'} Change that, drop {keys}, or drop "
        "the preset and name all parts."
    )


def _ruled_out(part: Part, section: Any, vllm_config: Any) -> str:
    """The part's own sentences, as facts; empty if it can run."""
    return facts(part.refuses(section, vllm_config))


def _write(vllm_config: Any, decided: Decision, sections: dict[str, Any]) -> None:
    # The user's own mapping is not changed, because another engine may be made of it.
    graft = {**sections, NAME: decided.model_dump()}
    vllm_config.additional_config = {**vllm_config.additional_config, KEY: graft}


def _fill_in(part: Part, offer: Offer, vllm_config: Any) -> dict[str, Any]:
    """Let a part fill in what follows from its section; return what it replaced, and what vLLM has
    yet to derive from that."""
    derived = {path: _get(vllm_config, path) for path in _DERIVED}
    if offer.speculative is not None:
        vllm_config.speculative_config = offer.speculative
        part.fill_in(offer.section, vllm_config)
        return {SPECULATIVE: None, **derived}
    before = {path: _get(vllm_config, path) for path in _FILLED_IN}
    part.fill_in(offer.section, vllm_config)
    changed = {path: value for path, value in before.items() if _get(vllm_config, path) != value}
    return {**changed, **derived} if changed else {}


def _restore(vllm_config: Any, before: dict[str, Any]) -> None:
    planned = any(_get(vllm_config, path) != before[path] for path in _SIZES if path in before)
    sizes = _get(vllm_config, _SIZES[0])
    for path, value in before.items():
        _set(vllm_config, path, value)
    if planned:
        # They were planned for the rows of trees.
        vllm_config._set_cudagraph_sizes()
        if not sizes:
            # The platform has taken the graphs away since.
            _set(vllm_config, _SIZES[0], sizes)


def _set(vllm_config: Any, path: str, value: Any) -> None:
    parent, _, name = path.rpartition(".")
    setattr(_get(vllm_config, parent) if parent else vllm_config, name, value)


def _get(vllm_config: Any, path: str) -> Any:
    """The value at a dotted path; None where a part of the path is None."""
    return functools.reduce(
        lambda found, name: None if found is None else getattr(found, name),
        path.split("."),
        vllm_config,
    )


def _log(decided: Decision) -> None:
    head = f"vllm-graft {__version__}, {FLAG} {decided.preset}"
    for name, says in decided.on.items():
        info_once(f"{head}: {name} on: {says}")
    for name, reason in decided.off.items():
        info_once(f"{head}: {name} off: {reason}")
