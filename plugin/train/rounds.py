"""``vllm-graft learn``: rounds of training on what a server records, and heads that it follows."""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from vllm_graft.base.errors import ConfigError, GraftError
from vllm_graft.base.locks import locked
from vllm_graft.base.values import reason_of
from vllm_graft.learn.publications import (
    REFUSED,
    Facts,
    Publication,
    Publications,
    digest,
    weights_of,
)
from vllm_graft.learn.records import PATTERN
from vllm_graft.train.command import begin, check, run
from vllm_graft.train.command import make_parser as train_parser
from vllm_graft.train.job import BEFORE, REPORT

ABOUT = """Go on training the head of a server from what it records, round after round, on a GPU
that the server does not use (CUDA_VISIBLE_DEVICES). After each round the new head and the one that
serves are measured on the same held-out texts. If the new one is better, it is published in a
folder; a server with --additional-config.graft.learn.follow takes it from there. Options of
`vllm-graft train` and flags of `vllm serve` may follow those below."""

ROUND, LOCK = "round", "trainer.lock"
"""Folder of a round and file of the lock, in the folder where heads are published."""

PAUSE = 10.0
"""Seconds between two looks for new records."""

REST = 60.0
"""Seconds of rest after a round that failed."""

NEWEST = "32MiB"
"""Records that a round learns from, some 5 million tokens, more than it has time for."""


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's own options."""
    parser = argparse.ArgumentParser(prog="vllm-graft learn", description=ABOUT, allow_abbrev=False)
    add = parser.add_argument
    add("model", metavar="MODEL", help="the target, as the server was given it")
    told = "what the server records: the folder of its --additional-config.graft.learn.record"
    add("--from-traffic", required=True, metavar="FOLDER", help=told)
    told = "folder of the head that the server was started with"
    add("--head", required=True, metavar="HEAD", help=told)
    told = "folder for heads: that of the server's --additional-config.graft.learn.follow"
    add("--publish", required=True, metavar="FOLDER", help=told)
    told = "minutes of a round, most of them on the GPU (default: %(default)g)"
    add("--minutes-per-round", type=float, default=10.0, help=told)
    add("--rounds", type=int, default=0, help="rounds to train for, at most (default: no limit)")
    told = "share by which a new head's acceptance length must be better (default: %(default)g)"
    add("--margin", type=float, default=0.01, help=told)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    begin()
    read, more = make_parser().parse_known_args(arguments)
    try:
        learner = Learner(read, more)
        with locked(learner.folder / LOCK) as alone:
            if not alone:
                raise ConfigError(
                    f"--publish {read.publish} has a trainer that runs: give another folder, or "
                    "stop that one."
                )
            learner.learn()
    except GraftError as error:
        sys.exit(str(error))
    except OSError as error:  # The lock's file is somebody else's, or no file.
        sys.exit(f"--publish {read.publish} can't be locked: {reason_of(error)}")
    except KeyboardInterrupt:
        sys.exit("stopped: published heads stay, and the same command goes on from the best")
    return 0


class Learner:
    """Rounds of training. `more`: options of ``train`` and of ``vllm serve``. Raises `ConfigError`
    if an option is wrong, or the folder can't be made."""

    def __init__(self, read: argparse.Namespace, more: Sequence[str]) -> None:
        for name, low in (("minutes_per_round", 0.01), ("rounds", 0), ("margin", 0)):
            if not low <= (value := getattr(read, name)) < float("inf"):
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} is {value}: give a number from {low} on.")
        base = weights_of(read.head)
        if base is None:
            raise ConfigError(
                f"--head {read.head} has no model.safetensors: give the folder of a head that "
                "`vllm-graft train` made, which the server drafts with."
            )
        self.read, self.more, self.base = read, list(more), base
        self.digest = digest(base)
        self.folder = Path(read.publish).resolve()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--publish {read.publish} can't be made: {reason_of(error)}. Give another folder."
            ) from None
        self.shelf = Publications(self.folder)

    def learn(self) -> None:
        """Train until all rounds are over. A round that fails is told, and another one begins.
        Raises `GraftError` if none could be one."""
        check(*self._asked(self.base.parent))
        done, seen, waits = 0, 0.0, False
        while not self.read.rounds or done < self.read.rounds:
            newest = self._newest()
            # A clock that is set back makes new records look older.
            if newest in (0.0, seen):
                if not waits:
                    print(f"Waiting for new records in {self.read.from_traffic}.", flush=True)
                waits = True
                time.sleep(PAUSE)
                continue
            done, seen, waits = done + 1, newest, False
            try:
                print(f"Round {done}: {self.round()}", flush=True)
            except (Exception, SystemExit) as error:
                why = reason_of(error)
                print(f"Round {done} failed: {why}. Nothing is published.", flush=True)
                time.sleep(REST if done != self.read.rounds else 0)
            finally:
                # It has copies of what users asked.
                shutil.rmtree(self.folder / ROUND, ignore_errors=True)

    def round(self) -> str:
        """Train, measure, and publish what is better; returns a sentence on it."""
        began, out = time.time(), self.folder / ROUND
        shutil.rmtree(out, ignore_errors=True)
        serving = self._serving()
        head = self.base.parent if serving is None else serving.folder
        run(*self._asked(head), began + 60 * self.read.minutes_per_round)
        report = json.loads((out / REPORT).read_text())
        before, after = (
            fmean(each["length"] for each in report[name].values()) for name in (BEFORE, "held out")
        )
        told = f"acceptance length {after:.3f} on held-out texts, {before:.3f} before"
        if not after >= before * (1 + self.read.margin):
            return f"{told}: nothing is published."
        seconds = time.time() - began + (0 if serving is None else serving.facts.seconds)
        number = 0 if serving is None else serving.number
        facts = Facts(self.digest, number, before, after, round(seconds, 1))
        files = [each for each in out.iterdir() if each.is_file()]
        published = self.shelf.publish(files, facts)
        self.shelf.trim(self.digest)
        return f"{told}: head {published.number} is published in {published.folder}."

    def _asked(self, head: Path) -> tuple[argparse.Namespace, list[str]]:
        """What a round asks of ``train``, to go on with a head."""
        words = [self.read.model, "--from-traffic", self.read.from_traffic, "--newest", NEWEST]
        words += ["--minutes", str(self.read.minutes_per_round), *self.more]
        words += ["--start-from", str(head), "--out", str(self.folder / ROUND)]
        return train_parser().parse_known_args(words)

    def _serving(self) -> Publication | None:
        """The newest head that no server has refused; None for the base."""
        found = [each for each in self.shelf.each(self.digest) if each.verdict != REFUSED]
        return found[-1] if found else None

    def _newest(self) -> float:
        """When the newest record was written, in seconds since 1970; 0 without one."""
        files = Path(self.read.from_traffic).glob(PATTERN)
        try:
            return max((each.stat().st_mtime for each in files), default=0.0)
        except OSError:  # The server makes room.
            return 0.0
