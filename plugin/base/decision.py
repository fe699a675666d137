"""What a preset has decided, beside the sections that it wrote.

A preset stands in place of the mapping below ``graft``, or in it, beside what it does
not decide. The frontend replaces it by the sections of the parts that it turns on, and keeps its
decisions beside them: workers look at them because a part that nobody named must not stop a worker.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import Field

from vllm_graft.base import info
from vllm_graft.base.errors import GraftError
from vllm_graft.base.options import KEY, GraftSection

NAME = "decided"
"""Where the decisions stand, below ``graft``."""

PRESET = "preset"
"""Where a preset stands in a mapping below ``graft``."""

SPECULATIVE = "speculative_config"

Preset = Literal["auto", "latency", "throughput"]
PRESETS: tuple[str, ...] = get_args(Preset)


class Decision(GraftSection):
    """What a preset turned on and left off: what runs of each part, or why it does not. A
    configuration that no preset made has none."""

    NAME = NAME

    preset: Preset

    on: dict[str, str]

    off: dict[str, str]

    asked: list[str] = Field(default_factory=list)
    """Parts for which the user gave keys beside the preset."""

    before: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """By a part's name, values of vLLM's configuration before it filled them in, by dotted path."""

    settled: bool = False
    """Whether the complete configuration was looked at, too."""


def preset_in(vllm_config: Any) -> str | None:
    """The text in place of the mapping below ``graft`` or in it, whatever it is; None without."""
    additional = vllm_config.additional_config
    found = additional.get(KEY) if isinstance(additional, Mapping) else None
    found = found.get(PRESET) if isinstance(found, Mapping) else found
    return found if isinstance(found, str) else None


def gave_drafts(vllm_config: Any) -> bool:
    """Whether a preset gave vLLM the speculative config, as the user gave none."""
    decided = Decision.from_vllm(vllm_config)
    return decided is not None and any(SPECULATIVE in each for each in decided.before.values())


def decline_or_raise(part: str, refused: GraftError, vllm_config: Any) -> None:
    """Leave a part off in this process if a preset turned it on. Raises ``refused`` if the user
    named the part, or gave keys for it."""
    decided = Decision.from_vllm(vllm_config)
    if decided is None or part in decided.asked:
        raise refused
    info.decline(part, str(refused))


def told(vllm_config: Any) -> dict[str, Any] | None:
    """What a preset decided, with what this worker found after that; None without a preset."""
    decided = Decision.from_vllm(vllm_config)
    if decided is None:
        return None
    declined = info.declined()
    on = {name: says for name, says in decided.on.items() if name not in declined}
    return {"name": decided.preset, "on": on, "off": {**decided.off, **declined}}
