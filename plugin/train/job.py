"""What a training run was asked for, kept in its folder so that it can go on after a kill."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.values import shown
from vllm_graft.train.target import Target

FOLDER = ".train"
"""Folder of a run within that of its head, which goes when the head is written."""

FILE = "job.json"
"""The job in that folder."""

REPORT, BEFORE = "training.json", "held out, before"
"""File of a head that says how it was trained, and its key for the head that training went on
with."""

_ANEW = ("minutes", "answer_minutes", "save_seconds", "disk_bytes", "batch_tokens", "flags", "keep")
"""Settings that a run that goes on may have anew: none of them says what is learned of what."""


_BAR = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


def _number(default: float, least: float, text: str) -> Any:
    return field(default=default, metadata={"least": least, "help": text})


def flag_of(name: str) -> str:
    """The command's option of a setting."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Job:
    """Settings of a run, named as the options of the command; numbers have their help.

    Attributes:
        out: folder of the head.
        flags: of ``vllm serve``, for the engine that answers.
        start_from: folder of a head to go on with; empty for a new one.
        disk_bytes: most that states may take.
    """

    model: str
    texts: tuple[str, ...]
    out: str
    states: str
    target: Target
    disk_bytes: int
    flags: tuple[str, ...] = ()
    start_from: str = ""
    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0)
    keep: bool = False
    minutes: float = _number(60.0, 0.01, "for all of it")
    answer_minutes: float = _number(
        0.0, 0, "for the target's answers without its start; 0: 40 %% of all"
    )
    max_tokens: int = _number(512, 2, "of an answer")
    longest: int = _number(1024, 16, "tokens of a question with its answer")
    draft_vocab: int = _number(
        32000, 1, "tokens that the head can draft, at most half of the target's"
    )
    passes: int = _number(6, 1, "depth of drafts that is trained for")
    batch_tokens: int = _number(8192, 16, "tokens of a step on each device")
    rate: float = _number(0.0, 0, "learning rate; 0: by the target's size")
    steps: int = _number(0, 0, "of training, at most; 0: no limit")
    seed: int = _number(0, 0, "of all draws")
    save_seconds: float = _number(300.0, 0, "between two checkpoints")

    @property
    def work(self) -> Path:
        return Path(self.out) / FOLDER

    def save(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        (self.work / FILE).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, work: Path) -> Self:
        # Of a name that is not UTF-8 pydantic can't read the JSON itself.
        return TypeAdapter(cls).validate_python(json.loads((work / FILE).read_text()))

    def continues(self) -> bool:
        """Whether the folder has a run of this very job. Raises `ConfigError` if it has one of
        another job."""
        if not (self.work / FILE).exists():
            return False
        try:
            before = dict(json.loads((self.work / FILE).read_text()))
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"--out {self.out}: {self.work / FILE} can't be read ({error}): remove "
                f"{self.work}, or give another folder."
            ) from None
        for name, new in json.loads(json.dumps(asdict(self))).items():
            if name not in _ANEW and (old := before.get(name)) != new:
                called = {"model": "MODEL", "target": f"the configuration of {self.model}"}
                raise ConfigError(
                    f"--out {self.out} has a run that was begun with other settings: "
                    f"{called.get(name, flag_of(name))} was {shown(old)} and is {shown(new)}. "
                    f"Give what it was begun with, or another folder, or remove {self.work}."
                )
        return True


def progress_bar(what: str, *, shows: bool) -> Any:
    """A bar of tqdm's on standard error, which `show` moves; it isn't drawn unless it `shows`."""
    from tqdm import tqdm

    return tqdm(total=100, desc=what, bar_format=_BAR, disable=not shows)


def show(bar: Any, share: float, **figures: object) -> None:
    """Tell a bar the share that is done; it draws itself some times a second at most."""
    bar.set_postfix(refresh=False, **figures)
    bar.update(min(100.0, round(100 * share, 1)) - bar.n)
