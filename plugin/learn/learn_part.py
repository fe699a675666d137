"""The part ``graft.learn``: the scheduler records what it has served."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from vllm_graft.base.decision import Preset
from vllm_graft.base.options import flag
from vllm_graft.base.part import Offer, Part
from vllm_graft.base.refusal import Found, Refusal, Refusals, setting
from vllm_graft.base.values import reason_of, shown
from vllm_graft.learn.learn_config import NAME, LearnConfig
from vllm_graft.learn.recorder import METRICS, record
from vllm_graft.seams.post_import import after_import
from vllm_graft.seams.wrap import around

_FOLDER = flag(NAME, "record")
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
    "It gets what users ask and are answered.",
    f"name another folder in `{_FOLDER}`, one that does not exist yet, or one of yours with rights "
    "for its owner alone (`chmod 700`)",
)
def _folder(asked: LearnConfig, vllm_config: Any) -> Iterator[Found]:
    if problem := _problem(Path(asked.record)):
        yield Found(f"{_FOLDER} is {shown(asked.record)}, {problem}")


def _problem(folder: Path) -> str:
    """What is wrong with a folder for records; empty if nothing is."""
    try:
        status = folder.stat()
    except FileNotFoundError:
        parent = next(each for each in folder.absolute().parents if each.exists())
        usable = parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)
        return "" if usable else f"which can't be made in {parent}"
    except OSError as error:
        return f"which can't be read: {reason_of(error)}"
    if not stat.S_ISDIR(status.st_mode):
        return "which is a file"
    if status.st_uid != os.geteuid():
        return "which is another user's"
    if status.st_mode & 0o077:
        return f"whose mode is {stat.S_IMODE(status.st_mode):o}"
    return "" if os.access(folder, os.W_OK | os.X_OK) else "which can't be written"


class LearnPart(Part):
    """Records of finished requests."""

    name = NAME
    asks_for = "records of requests"
    flag = flag(NAME)
    refusals: Sequence[Refusal] = REFUSALS
    metrics = METRICS

    def install(self) -> None:
        after_import("vllm.v1.core.sched.scheduler", _hook_scheduler)

    def automatic(self, preset: Preset, vllm_config: Any) -> Offer | str:
        """Leave it to the user, who alone can say where texts of requests may lie."""
        return ""

    def describe(self, asked: LearnConfig, vllm_config: Any) -> str:
        return f"requests are recorded in {asked.record}, {asked.record_bytes.human_readable()}"


def _hook_scheduler(module: ModuleType) -> None:
    @around(module.Scheduler, "__init__")
    def then_record(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if (config := LearnConfig.from_vllm(self.vllm_config)) is not None:
            record(self, config)


LEARNING = LearnPart()
