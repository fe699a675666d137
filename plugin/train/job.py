"""What a training run was asked for, kept in its folder so that it can go on after a kill."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.values import shown

FOLDER = ".train"
"""Folder of a run within that of its head, which goes when the head is written."""

_FILE = "job.json"

MAY_CHANGE = frozenset(
    {"minutes", "answer_minutes", "save_seconds", "disk_bytes", "batch_tokens", "flags", "keep"}
)
"""Settings that a run that goes on may have anew: none of them says what is learned from what."""


@dataclass(frozen=True)
class Job:
    """Settings of a run. `docs/training.md` says what the options mean.

    Attributes:
        flags: of ``vllm serve``, for the engine that answers.
        answer_minutes: for answering, without the engine's start.
        steps: of training, at most; 0 for no limit.
        longest: tokens of a text, with its answer.
        batch_tokens: of a device in a step.
        rate: learning rate; 0 for one by the target's size.
        disk_bytes: most that states may take.
        target: `vllm_graft.train.target.Target` as a dictionary.
    """

    model: str
    texts: tuple[str, ...]
    out: str
    states: str
    flags: tuple[str, ...] = ()
    minutes: float = 60.0
    answer_minutes: float = 24.0
    steps: int = 0
    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0)
    max_tokens: int = 512
    longest: int = 1024
    draft_vocab: int = 32000
    passes: int = 6
    batch_tokens: int = 8192
    rate: float = 0.0
    seed: int = 0
    save_seconds: float = 300.0
    disk_bytes: int = 0
    keep: bool = False
    target: dict[str, Any] | None = None

    @property
    def work(self) -> Path:
        """The folder of the run."""
        return Path(self.out) / FOLDER

    def save(self) -> None:
        """Write it where `load` finds it."""
        self.work.mkdir(parents=True, exist_ok=True)
        (self.work / _FILE).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, work: Path) -> Job:
        """Read the job of a run's folder."""
        found = json.loads((work / _FILE).read_text())
        for name in ("texts", "flags", "temperatures"):
            found[name] = tuple(found[name])
        return cls(**found)

    def continues(self) -> bool:
        """Whether the folder has a run of this very job.

        Raises:
            ConfigError: it has one of another job.
        """
        try:
            before = Job.load(self.work)
        except FileNotFoundError:
            return False
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"--out {self.out}: {self.work / _FILE} can't be read ({error}): remove "
                f"{self.work}, or give another folder."
            ) from None
        for each in fields(self):
            old, new = getattr(before, each.name), getattr(self, each.name)
            if old != new and each.name not in MAY_CHANGE:
                name = "MODEL" if each.name == "model" else f"--{each.name.replace('_', '-')}"
                if each.name == "target":
                    name = f"the configuration of {self.model}"
                raise ConfigError(
                    f"--out {self.out} has a run that was begun with other settings: {name} was "
                    f"{shown(old)} and is {shown(new)}. Give what it was begun with, or another "
                    f"folder, or remove {self.work}."
                )
        return True
