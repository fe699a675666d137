"""What an engine would run, decided by the code that decides it when a server starts."""

import enum
import functools
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_graft.activation import asked_for, require_registered
from vllm_graft.base.decision import Decision, gave_drafts
from vllm_graft.base.errors import GraftError
from vllm_graft.base.options import flag
from vllm_graft.base.part import Part
from vllm_graft.base.refusal import facts
from vllm_graft.base.text_table import table
from vllm_graft.base.values import human
from vllm_graft.hooks import entries, manager
from vllm_graft.hooks.feature import Feature
from vllm_graft.parts import PARTS
from vllm_graft.plan.memory import HOST, Memory, memory_of
from vllm_graft.plan.request import Request
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.presets.known_drafts import mtp_config
from vllm_graft.spec_decode.targets.families import FEATURES, HOOK
from vllm_graft.spec_decode.targets.recurrent.recurrent_features import has_delta_rule, state_room

SEQUENCES = "--max-num-seqs"

_ABSENT = (
    "LocalEntryNotFoundError",
    "RepositoryNotFoundError",
    "OfflineModeIsEnabled",
    "HFValidationError",
)
_NOT_THERE = re.compile("Invalid repository ID or local directory specified: '(.+?)'")
"""How the Hub's client and vLLM say that a model is not there."""


class Verdict(enum.Enum):
    """What comes of a start; the value is the exit status."""

    ON = 0
    """The server starts, and every part that was asked for by name runs, or one of a preset's."""

    REFUSED = 1
    """The server does not start."""

    OFF = 3
    """The server starts, and nothing of ours runs."""


@dataclass(frozen=True)
class PartPlan:
    """One part: ``state`` is ``on``, ``off`` or ``refused``; ``reason`` says what runs, or why."""

    name: str
    state: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """The whole plan. Where the server does not start, `refused` says why, and there are no
    command, parts and memory. `better` is what would draft instead, and the command for it."""

    verdict: Verdict
    device: str
    command: str = ""
    refused: str = ""
    target: str = ""
    drafts: str = ""
    parts: list[PartPlan] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    better: tuple[str, str] | tuple[()] = ()


def make_plan(request: Request, device: str) -> Plan:
    """Plan what a server with these flags would run."""
    plan, vllm_config = plan_of(request, device)
    tried, found = request, plan
    # A draft may need more flags in turn.
    for _ in range(2):
        more = _more_flags(tried, found, vllm_config)
        if not more:
            break
        tried = tried.adding(*more)
        found, vllm_config = plan_of(tried, device)
        if found.verdict is not Verdict.REFUSED and found.drafts != plan.drafts:
            plan = replace(plan, better=(found.drafts, found.command))
    return plan


def refused(error: Exception, device: str, model: str) -> Plan:
    """The plan of flags that vLLM or a part of ours refuses before there is a configuration."""
    says = str(error) if isinstance(error, GraftError) else _text(error, model)
    return Plan(Verdict.REFUSED, device, refused=says)


def plan_of(request: Request, device: str) -> tuple[Plan, Any]:
    """The plan of these flags alone, and vLLM's configuration; None where it is refused."""
    try:
        vllm_config = request.create()
        require_registered()
    except Exception as error:  # Whatever vLLM's own checks raise, or ours.
        return refused(error, device, str(request.engine.model)), None
    parts = list(_parts(vllm_config))
    reasons = [part.reason for part in parts if part.state == "refused"]
    reasons += _no_hidden_states(vllm_config)
    memory, lacks = memory_of(vllm_config)
    reasons += [lacks] if lacks else []
    verdict = Verdict.ON if any(part.state == "on" for part in parts) else Verdict.OFF
    verdict = Verdict.REFUSED if reasons else verdict
    plan = Plan(
        verdict, device, command=request.command if verdict is not Verdict.REFUSED else "",
        refused=" ".join(reasons), target=_target(vllm_config),
        drafts=_drafts(vllm_config, {part.name for part in parts if part.state == "on"}),
        parts=parts, memory=memory,
    )  # fmt: skip
    return plan, vllm_config


def _more_flags(request: Request, plan: Plan, vllm_config: Any) -> tuple[str, ...]:
    """Flags with which a checkpoint's own module drafts, or trees have room that lack it."""
    if vllm_config is None:
        return ()
    model = vllm_config.model_config
    if vllm_config.speculative_config is None or gave_drafts(vllm_config):
        found = mtp_config(model)
        return ("--speculative-config", json.dumps(found)) if found is not None else ()
    if any((part.name, part.state) == ("tree", "on") for part in plan.parts):
        return ()
    decided = Decision.from_vllm(vllm_config)
    if decided is None or not has_delta_rule(model) or request.has(SEQUENCES):
        return ()
    room = state_room(vllm_config)
    return () if room.fits or not room.requests else (SEQUENCES, str(room.requests))


_READERS = {"eagle3": "an EAGLE-3", "dflash": "a DFlash", "dspark": "a DSpark"}
"""Methods whose drafts read states of several of the target's layers."""


def _no_hidden_states(vllm_config: Any) -> Iterator[str]:
    """Whether vLLM would find that the loaded target hands nothing to a draft that asks for it."""
    from vllm.model_executor.models import registry

    kind = _READERS.get(getattr(vllm_config.speculative_config, "method", None) or "")
    if kind is None:
        return
    model = vllm_config.model_config
    try:
        # The class is asked where it can be imported, as vLLM itself inspects it.
        supported = registry._run_in_subprocess(functools.partial(gives_states, model))
    except Exception:
        return
    if not supported:
        name = " ".join(model.architectures)
        yield (
            f"vLLM refuses it: {name} gives no hidden states to {kind} draft. Use a draft of "
            "another method, or serve another target."
        )


def gives_states(model: Any) -> bool:
    """Whether the class of a model, of a ``ModelConfig``, hands hidden states to drafts."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_eagle3

    made, _ = ModelRegistry.resolve_model_cls(model.architectures, model)
    return bool(supports_eagle3(made))


def _text(error: Exception, model: str) -> str:
    """The message of an error; of pydantic's, the messages of vLLM's validators alone."""
    details: Any = getattr(error, "errors", None)
    text = str(error) or type(error).__name__
    if callable(details):
        text = " ".join(str(each["msg"]).removeprefix("Value error, ") for each in details())
    if (named := _NOT_THERE.match(text)) or type(error).__name__ in _ABSENT:
        name = named[1] if named else model
        if Path(name).is_dir():
            return (
                f"{name} has no configuration that vLLM finds: config.json, or with "
                "--config-format mistral params.json."
            )
        return (
            f"{name} is not there: it is no folder of this machine, and the Hub has no such model, "
            "or can't be asked from here."
        )
    return f"vLLM refuses it: {text}"


def _parts(vllm_config: Any) -> Iterator[PartPlan]:
    decided = Decision.from_vllm(vllm_config)
    sections = {part.name: section for part, section in asked_for(vllm_config)}
    for part in PARTS:
        if part.name in sections:
            yield _of_asked(part, sections[part.name], decided, vllm_config)
        else:
            # A preset leaves out what has nothing to do with the model.
            why = f"It was not asked for ({part.flag})."
            if decided is None or (why := decided.off.get(part.name, "")):
                yield PartPlan(part.name, "off", why)


def _of_asked(part: Part, section: Any, decided: Decision | None, vllm_config: Any) -> PartPlan:
    by_preset = decided is not None and part.name in decided.on
    foreseen = list(part.foresees(section, vllm_config))
    if foreseen and by_preset:
        # A worker leaves off what a preset turned on, and stops for what was asked for by name.
        return PartPlan(part.name, "off", facts(foreseen))
    if foreseen:
        return PartPlan(part.name, "refused", " ".join(foreseen))
    if decided is not None and by_preset:
        return PartPlan(part.name, "on", decided.on[part.name])
    return PartPlan(part.name, "on", part.describe(section, vllm_config))


def _target(vllm_config: Any) -> str:
    model = vllm_config.model_config
    name = " ".join(model.architectures)
    found = [feature for feature in FEATURES if feature.in_model(model)]
    if not found:
        return f"{name}, plain attention"
    return f"{name}, with " + "; ".join(f"{each.name} ({_served(each)})" for each in found)


def _served(feature: Feature) -> str:
    offered = (offer.entry for offer in manager.manager().offers(HOOK))
    serving = [
        entry.name
        for entry in offered
        if isinstance(entry, entries.TargetFamily) and feature.name in entry.serves
    ]
    if not serving:
        return "no trees"
    key = flag("tree", feature.asked)
    asked = f", {'unless' if feature.unasked else 'with'} {key} {str(not feature.unasked).lower()}"
    return f"trees by the family {' or '.join(serving)}{asked if feature.asked else ''}"


def _drafts(vllm_config: Any, on: set[str]) -> str:
    speculative = vllm_config.speculative_config
    if speculative is None:
        return "nothing: there is no --speculative-config"
    tree, tokens = TreeConfig.from_vllm(vllm_config), speculative.num_speculative_tokens
    if tree is None or "tree" not in on:
        by = "graphs of ours" if "draft" in on else "stock vLLM"
        return f"chains of {tokens} tokens by {speculative.method!r}, in {by}"
    if tree.topk == 1:
        return f"chains of {tokens} tokens by {speculative.method!r}, with our draft loop"
    most = "up to " if tree.shape == "auto" else ""
    seen = ""
    if tree.draft_window is not None:
        seen = (
            f"; before a tree the draft reads the last {tree.draft_window} tokens and the first "
            "block of the text, so that fewer drafts may be accepted"
        )
    return (
        f"trees of {most}{tokens} nodes by {speculative.method!r} "
        f"(topk {tree.topk}, steps {tree.steps}){seen}"
    )


_HEADS = {"parts": ("part", "state", "why"), "memory": ("memory", "size", "where it is from")}
_STYLES = {"on": "green", "off": "dim", "refused": "bold red", "unknown": "yellow"}


def as_dict(plan: Plan) -> dict[str, Any]:
    """The plan for programs."""
    return {**asdict(plan), "verdict": plan.verdict.name.lower(), "status": plan.verdict.value}


def render(plan: Plan) -> str:
    """The plan for people."""
    lines = [f"planned for {plan.device}"]
    for name, text in (("target", plan.target), ("drafts", plan.drafts)):
        lines += [f"{name}: {text}"] if text else []
    tables = {
        "parts": [(part.name, part.state, part.reason) for part in plan.parts],
        "memory": [(row.what, _size(row), row.says) for row in plan.memory],
    }
    lines += ["", *(table(_HEADS[name], rows, _STYLES) for name, rows in tables.items() if rows)]
    if plan.refused:
        lines += ["refused: the server would not start.", plan.refused]
    else:
        lines += ["serve it with:", f"  {plan.command}"]
    if plan.better:
        lines += [f"or, for {plan.better[0]}:", f"  {plan.better[1]}"]
    return "\n".join(lines)


def _size(row: Memory) -> str:
    if row.num_bytes is None:
        return "unknown"
    return human(row.num_bytes) + ("" if row.per == HOST else f" per {row.per}")
