"""What a training run was asked for, kept in its folder so that it can go on after a kill."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.values import shown

FOLDER = ".train"
"""Folder of a run within that of its head, which goes when the head is written."""

FILE = "job.json"
"""The job in that folder."""

_ANEW = ("minutes", "answer_minutes", "save_seconds", "disk_bytes", "batch_tokens", "flags", "keep")
"""Settings that a run that goes on may have anew: none of them says what is learned of what."""


@dataclass(frozen=True)
class Job:
    """Settings of a run, named as the options of the command.

    Attributes:
        out: folder of the head.
        flags: of ``vllm serve``, for the engine that answers.
        steps: of training, at most; 0 for no limit.
        rate: learning rate; 0 for one by the target's size.
        disk_bytes: most that states may take.
        target: `vllm_graft.train.target.Target` as a dictionary.
    """

    model: str
    texts: tuple[str, ...]
    out: str
    states: str
    target: dict[str, Any]
    disk_bytes: int
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
    keep: bool = False

    @property
    def work(self) -> Path:
        """The folder of the run."""
        return Path(self.out) / FOLDER

    def save(self) -> None:
        """Write it where `load` finds it."""
        self.work.mkdir(parents=True, exist_ok=True)
        (self.work / FILE).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, work: Path) -> Job:
        """Read the job of a run's folder."""
        found = json.loads((work / FILE).read_text())
        tuples = {name: tuple(found[name]) for name in ("texts", "flags", "temperatures")}
        return cls(**{**found, **tuples})

    def continues(self) -> bool:
        """Whether the folder has a run of this very job.

        Raises:
            ConfigError: it has one of another job.
        """
        if not (self.work / FILE).exists():
            return False
        try:
            before = json.loads((self.work / FILE).read_text())
        except ValueError as error:
            raise ConfigError(
                f"--out {self.out}: {self.work / FILE} can't be read ({error}): remove "
                f"{self.work}, or give another folder."
            ) from None
        for name, new in json.loads(json.dumps(asdict(self))).items():
            if name not in _ANEW and (old := before.get(name)) != new:
                flag = {"model": "MODEL", "target": f"the configuration of {self.model}"}
                raise ConfigError(
                    f"--out {self.out} has a run that was begun with other settings: "
                    f"{flag.get(name, f'--{name}'.replace('_', '-'))} was {shown(old)} and is "
                    f"{shown(new)}. Give what it was begun with, or another folder, or remove "
                    f"{self.work}."
                )
        return True
