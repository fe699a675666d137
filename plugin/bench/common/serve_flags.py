"""Flags of ``vllm serve`` that all arms share, and an arm's engine and command made of them."""

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from vllm_graft.base.options import FLAG, KEY, without
from vllm_graft.bench.common.arm import Arm
from vllm_graft.bench.common.arm_processes import SHARE
from vllm_graft.bench.common.report import BenchmarkError
from vllm_graft.plan.memory import ROOM, TOKEN
from vllm_graft.plan.planning import Plan, plan_of, refused
from vllm_graft.plan.request import Request

ADDITIONAL = FLAG.removesuffix(f".{KEY}")

_ALLOWANCE = 5 << 30
"""Bytes of each engine for activations and CUDA graphs, which are known when it has started."""


@dataclass(frozen=True)
class Serving:
    """The text behind ``vllm serve``, with MODEL in front, and what it means. ``planned`` is what a
    server with these flags would run, ``config`` is vLLM's configuration."""

    arguments: tuple[str, ...]
    request: Request
    planned: Plan
    config: Any

    @classmethod
    def read(
        cls, arguments: Sequence[str], whose: str = "the flags", *, preset: bool = False
    ) -> Self:
        """Read flags with vLLM's own parser, and let vLLM and our parts check them. With `preset`
        it is asked for, if the flags ask for no part of ours. Raises `BenchmarkError` if vLLM or a
        part of ours refuses them; vLLM's parser exits for a flag that it doesn't know."""
        if not arguments or arguments[0].startswith("-"):
            raise BenchmarkError(
                "MODEL comes first, and the flags of vllm serve behind it: give a folder or a name."
            )
        from vllm_graft.plan.request import inspecting

        model = arguments[0]
        with inspecting():
            try:
                request = Request.parse(arguments, preset=preset)
                # vLLM writes into what it builds a configuration of.
                planned, config = plan_of(copy.deepcopy(request), "this machine")
            except Exception as error:  # vLLM's parser asks the Hub for some models.
                planned, config = refused(error, "this machine", model), None
        if planned.refused:
            raise BenchmarkError(f"{whose}: {planned.refused}")
        return cls(tuple(arguments), request, planned, config)

    @property
    def model(self) -> str:
        return self.arguments[0]

    @property
    def tokenizer(self) -> Any:
        from vllm.tokenizers.registry import cached_tokenizer_from_config

        return cached_tokenizer_from_config(self.config.model_config)

    def has(self, part: str) -> bool:
        return any((each.name, each.state) == (part, "on") for each in self.planned.parts)

    def why_not(self, part: str) -> str:
        return " ".join(each.reason for each in self.planned.parts if each.name == part)

    def options(self) -> dict[str, Any]:
        engine = self.request.engine
        default = Request.parse([self.model], preset=False).engine
        found = {
            each.name: value
            for each in fields(engine)
            if (value := getattr(engine, each.name)) != getattr(default, each.name)
        }
        # It belongs to a server's log.
        found.pop("enable_log_requests", None)
        if found.get("data_parallel_size", 1) > 1:
            raise BenchmarkError(
                "--data-parallel-size: an engine of this benchmark has one data-parallel rank. "
                "Leave the flag away."
            )
        return found | {"max_model_len": self.config.model_config.max_model_len}

    def arm(self, name: str, drafts: tuple[int, ...] = ()) -> Arm:
        """An arm whose engine these flags start, with them as its command."""
        arm = Arm(name, self.options(), drafts, per_gpu=self._per_gpu())
        return replace(arm, commands=dict.fromkeys(arm.columns, self.request.command))

    def _per_gpu(self) -> tuple[int, int] | None:
        """Bytes on each GPU without K/V, and those of a token, as far as the plan knows them."""
        from vllm.platforms import current_platform

        room = next((row.num_bytes for row in self.planned.memory if row.what == ROOM), None)
        kv = [row.num_bytes for row in self.planned.memory if row.per == TOKEN]
        if room is None or None in kv:
            return None
        device = current_platform.get_device_total_memory()
        taken = int(device * self.config.cache_config.gpu_memory_utilization) - room
        return taken, sum(filter(None, kv))


def groups(arms: Sequence[Arm], tokens: int) -> list[list[Arm]]:
    """Arms whose engines are up at the same time, each with K/V of so many tokens. All of them, if
    they fit into a GPU side by side, as far as is known; else one after another."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return [[*arms]]
    share = current_platform.get_device_total_memory() * SHARE / len(arms)
    for arm in arms:
        taken, token = arm.per_gpu or (math.inf, 0)
        cache = arm.options.get("kv_cache_memory_bytes") or tokens * token
        if taken + _ALLOWANCE + cache > share:
            return [[each] for each in arms]
    return [[*arms]]


def adding(arguments: Sequence[str], flag: str, values: Mapping[str, Any]) -> list[str]:
    """The arguments with more keys of a flag that takes a mapping, in JSON or in dots. Of a key
    that is there in dots already, the given value stays."""
    for place, each in enumerate(arguments):
        name, given, value = each.partition("=")
        if name.replace("_", "-") == flag:
            whole = json.loads(value if given else arguments[place + 1])
            rest = arguments[place + (1 if given else 2) :]
            return [*arguments[:place], *rest, flag, json.dumps({**whole, **values})]
    dotted = {each.partition("=")[0].replace("_", "-") for each in arguments if each[:2] == "--"}
    if not any(each.startswith(f"{flag}.") for each in dotted):
        return [*arguments, flag, json.dumps(values)]
    # VLLM puts dotted flags together, and they win over one with the whole mapping.
    more = {f"{flag}.{key.replace('_', '-')}": key for key in values}
    told = [(f"{flag}.{key}", values[key]) for name, key in more.items() if name not in dotted]
    return [*arguments, *(text for name, each in told for text in (name, json.dumps(each)))]


def bare(serving: Serving, *flags: str) -> list[str]:
    """The arguments without these flags, and without any part of ours."""
    additional = dict(serving.request.engine.additional_config or {})
    additional.pop(KEY, None)
    kept = without(serving.arguments, ADDITIONAL, *flags)
    return adding(kept, ADDITIONAL, additional) if additional else kept
