"""What runs of each part, as an engine core finds out from its configuration and its workers."""

from collections.abc import Iterable, Mapping
from typing import Any

from vllm_graft.base.decision import Decision
from vllm_graft.base.part import Part
from vllm_graft.base.values import reason_of

ON, OFF, DECLINED, MISSING = "on", "off", "declined", "missing"
STATES = {
    ON: "The part was asked for, and a worker runs it.",
    OFF: "Nobody asked for the part, or the preset's decision left it off.",
    DECLINED: "A preset turned the part on, and a worker found that it can't run.",
    MISSING: "The part was asked for, and no worker says that it runs it.",
}
"""The values of the label ``state`` of ``vllm:graft_info``."""

State = list[str]
"""A part's name, its state, and what runs or why it does not."""


def part_states(
    parts: Iterable[Part],
    sections: Mapping[str, Any],
    vllm_config: Any,
    workers: Iterable[Mapping[str, Any]],
) -> list[State]:
    """The state of each part, and of what a worker declined within a part (``tree.head_dtype``).
    ``sections`` are those of the parts that are asked for, by name. ``workers`` says of each worker
    what `vllm_graft.base.info.states` does."""
    active: set[str] = set()
    declined: dict[str, str] = {}
    for worker in workers:
        active.update(worker["on"])
        declined.update(worker["declined"])
    decided = Decision.from_vllm(vllm_config)
    left_off = {} if decided is None else decided.off
    states = []
    for part in parts:
        reason = declined.pop(part.name, None)
        if part.name not in sections:
            states.append([part.name, OFF, left_off.get(part.name, "not asked for")])
        elif reason is not None:
            states.append([part.name, DECLINED, reason])
        else:
            state = ON if part.name in active else MISSING
            states.append([part.name, state, _described(part, sections[part.name], vllm_config)])
    return [*states, *([name, DECLINED, reason] for name, reason in declined.items())]


def _described(part: Part, asked: Any, vllm_config: Any) -> str:
    try:
        return part.describe(asked, vllm_config)
    except Exception as error:
        return reason_of(error)
