"""The part ``graft.learn``: the scheduler records what it has served, and the engine follows heads
that were trained on that."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from vllm_graft.base.decision import Preset
from vllm_graft.base.errors import NotActiveError
from vllm_graft.base.locks import foreign, unusable_folder
from vllm_graft.base.options import flag
from vllm_graft.base.part import Offer, Part
from vllm_graft.base.refusal import Found, Refusal, Refusals, setting
from vllm_graft.base.values import shown
from vllm_graft.learn.follower import follow
from vllm_graft.learn.learn_config import NAME, LearnConfig
from vllm_graft.learn.learn_metrics import CURRENT, METRICS
from vllm_graft.learn.publications import weights_of
from vllm_graft.learn.recorder import record
from vllm_graft.seams.post_import import after_import
from vllm_graft.seams.wrap import after_scheduler, around

_FOLDER, _FOLLOW = flag(NAME, "record"), flag(NAME, "follow")
_DROP = f"drop `{flag(NAME)}`"

REFUSALS = Refusals()
REFUSALS.append(
    Refusal(
        "pooling models",
        "They write no answers.",
        _DROP,
        setting("model_config.runner_type", lambda runner: runner == "generate"),
    )
)


@REFUSALS.row(
    "a folder for records that others may read, or that can't be written",
    "Nobody else may read what users ask and are answered.",
    f"name another folder in `{_FOLDER}`, one that does not exist yet, or one of yours with rights "
    "for its owner alone (`chmod 700`)",
)
def _folder(asked: LearnConfig, vllm_config: Any) -> Iterator[Found]:
    if asked.record is not None and (problem := _problem(Path(asked.record))):
        yield Found(f"{_FOLDER} is {shown(asked.record)}: {problem}")


@REFUSALS.row(
    "`follow` with other drafts than those of an EAGLE-3 head",
    "`vllm-graft learn` trains EAGLE-3 heads alone.",
    "set `speculative_config.method` to 'eagle3' with a head that `vllm-graft train` made, or "
    f"drop `{_FOLLOW}`",
)
def _method(asked: LearnConfig, vllm_config: Any) -> Iterator[Found]:
    if asked.follow is None:
        return
    speculative = vllm_config.speculative_config
    if speculative is None:
        yield Found(f"{_FOLLOW} is {shown(asked.follow)}, and nothing drafts")
    elif speculative.method != "eagle3":
        yield Found(f"speculative_config.method is {speculative.method!r}")


@REFUSALS.row(
    "`follow` with a head that is quantized, or has no `model.safetensors`",
    "Weights of that form alone are published, and copied to where those of the head are.",
    f"name a head that `vllm-graft train` made in `speculative_config.model`, or drop `{_FOLLOW}`",
)
def _form(asked: LearnConfig, vllm_config: Any) -> Iterator[Found]:
    speculative = vllm_config.speculative_config
    if asked.follow is None or speculative is None or speculative.method != "eagle3":
        return
    draft = speculative.draft_model_config
    if draft.quantization is not None:
        yield Found(f"The draft's quantization is {shown(draft.quantization)}")
    # What a name on the Hub has is known when the model is loaded.
    if Path(draft.model).is_dir() and weights_of(draft.model) is None:
        yield Found(f"speculative_config.model is {shown(draft.model)}, without one")


@REFUSALS.row(
    "a file where published heads are looked for",
    "Heads are published as folders below one folder.",
    f"name the folder of `vllm-graft learn --publish` in `{_FOLLOW}`",
)
def _published(asked: LearnConfig, vllm_config: Any) -> Iterator[Found]:
    if asked.follow is not None and Path(asked.follow).is_file():
        yield Found(f"{_FOLLOW} is {shown(asked.follow)}, which is a file")


def _problem(folder: Path) -> str | None:
    """What is wrong with a folder for records; None if nothing is."""
    problem = unusable_folder(folder)
    if problem is None and folder.exists():
        status = folder.stat()
        problem = foreign(status)
        if status.st_mode & 0o077:
            problem = f"its mode is {stat.S_IMODE(status.st_mode):o}"
    return problem


class LearnPart(Part):
    """Records of finished requests, and heads that learned from them."""

    name = NAME
    asks_for = "records of requests, or heads that learned from them"
    flag = flag(NAME)
    refusals: Sequence[Refusal] = REFUSALS
    metrics = METRICS

    def install(self) -> None:
        after_import("vllm.v1.core.sched.scheduler", _hook_scheduler)
        after_import("vllm.v1.engine.core", _hook_engine)

    def seams(self, asked: LearnConfig, vllm_config: Any) -> Sequence[str]:
        """Add the moment from which on heads are followed."""
        return "core", "engine", NAME

    def automatic(self, preset: Preset, vllm_config: Any) -> Offer | str:
        """Leave it to the user, who alone can say where texts of requests may lie."""
        return ""

    def describe(self, asked: LearnConfig, vllm_config: Any) -> str:
        told = []
        if asked.record is not None:
            most = asked.record_bytes.human_readable()
            told.append(f"requests are recorded in {asked.record}, {most}")
        if asked.follow is not None:
            told.append(f"heads that are published in {asked.follow} are swapped in")
        return "; ".join(told)

    def verify(self, asked: LearnConfig, worker: Any, vllm_config: Any) -> None:
        """Check that a worker's runner knows its draft."""
        runner = worker.model_runner
        if asked.follow is not None and not hasattr(runner, "get_draft_model"):
            raise NotActiveError(
                f"{_FOLLOW} asks for other weights of the draft, and {type(runner).__module__}."
                f"{type(runner).__name__} does not tell its draft: drop the flag, or serve with "
                "Model Runner V2."
            )


def _hook_scheduler(module: ModuleType) -> None:
    @around(module.Scheduler, "__init__")
    def then_record(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        CURRENT.clear()
        config = LearnConfig.from_vllm(self.vllm_config)
        if config is not None and config.record is not None:
            CURRENT["record"] = record(self, config)


def _hook_engine(module: ModuleType) -> None:
    @after_scheduler(module.EngineCore)
    def then_follow(original: Any, self: Any) -> None:
        original(self)
        config = LearnConfig.from_vllm(self.vllm_config)
        if config is not None and config.follow is not None:
            CURRENT["follow"] = follow(self, config)


LEARNING = LearnPart()
