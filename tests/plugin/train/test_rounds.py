"""Rounds of training: what is published, what goes on, and a whole round of a small pair."""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import with_noise, write_changed
from tests.support.engines.pair_server import require_cpu_server, server_settings
from tests.support.engines.pairs import Pair, Request, answer_all
from tests.support.engines.shipped_pair import SHIPPED
from tests.support.processes import finished
from vllm_graft.base.errors import ConfigError
from vllm_graft.base.locks import locked
from vllm_graft.learn import follower
from vllm_graft.learn.learn_part import LEARNING
from vllm_graft.learn.publications import KEPT, REFUSED, WEIGHTS, Publications, digest
from vllm_graft.learn.records import Records
from vllm_graft.train import rounds
from vllm_graft.train.job import BEFORE, REPORT
from vllm_graft.train.rounds import LOCK, ROUND

HEAD = SHIPPED / "eagle3"


def measured(*lengths: float) -> dict[str, Any]:
    return {f"temperature {place}": {"length": each} for place, each in enumerate(lengths)}


class Run:
    """Stands in the place of `vllm_graft.train.command.run`.

    It trains what it is told: an acceptance length after, or an error.
    """

    def __init__(self, folder: Path, *results: float | BaseException) -> None:
        self.folder, self.results = folder, [*results]
        self.asked: list[argparse.Namespace] = []
        self.flags: list[Sequence[str]] = []

    def __call__(self, read: argparse.Namespace, flags: Sequence[str], until: float) -> str:
        self.asked.append(read)
        self.flags.append(flags)
        result = self.results.pop(0)
        out = Path(read.out)
        (out / ".train").mkdir(parents=True)
        (out / ".train" / "traffic.jsonl").write_text("what users ask")
        # New records come, for the next round.
        later = 1e10 + len(self.asked)
        os.utime(next(self.folder.glob("*.jsonl")), (later, later))
        if isinstance(result, BaseException):
            raise result
        shutil.copy(HEAD / WEIGHTS, out)
        report = {"held out": measured(result, result + 0.2), BEFORE: measured(2.0, 2.2)}
        (out / REPORT).write_text(json.dumps(report))
        return ""


@pytest.fixture
def learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Run, Publications]]:
    """Rounds with results, and the command's further options."""
    (tmp_path / "traffic").mkdir()
    Records(tmp_path / "traffic", 2**20).write([1], [2])
    monkeypatch.setattr(rounds, "PAUSE", 0.0)
    monkeypatch.setattr(rounds, "REST", 0.0)
    monkeypatch.setattr(rounds, "begin", lambda: None)
    monkeypatch.setattr(rounds, "check", lambda read, flags: None)

    def run(*results: float | BaseException, more: Sequence[str] = ()) -> tuple[Run, Publications]:
        made = Run(tmp_path / "traffic", *results)
        monkeypatch.setattr(rounds, "run", made)
        words = ["M", "--from-traffic", str(tmp_path / "traffic"), "--head", str(HEAD)]
        words += ["--publish", str(tmp_path / "shelf"), "--rounds", str(len(results) or 1), *more]
        assert rounds.main(words) == 0
        return made, Publications(tmp_path / "shelf")

    return run


def test_what_is_better_by_a_margin_is_published(learn: Any, tmp_path: Path) -> None:
    run, shelf = learn(2.01, 2.5, 1.5, 2.4, more=["--batch-tokens", "512", "--dtype", "float32"])
    key = digest(HEAD / WEIGHTS)
    first, second = shelf.each(key)
    assert (first.facts.before, first.facts.after) == pytest.approx((2.1, 2.6))
    assert (first.facts.trained_from, second.facts.trained_from) == (0, 1)
    assert second.facts.seconds >= first.facts.seconds >= 0
    assert {each.name for each in first.folder.iterdir()} == {WEIGHTS, REPORT, "published.json"}
    assert [each.start_from for each in run.asked] == [
        *(str(HEAD),) * 2,
        *(str(first.folder),) * 2,
    ]
    assert (run.asked[0].batch_tokens, run.asked[0].newest) == (512, "32MiB")
    assert run.flags[0] == ["--dtype", "float32"]
    # Nothing of what users asked is left, and nobody else reads what is.
    assert not (tmp_path / "shelf" / ROUND).exists()
    assert (tmp_path / "shelf").stat().st_mode & 0o777 == 0o700


def test_training_goes_on_from_the_newest_head_that_no_server_refused(learn: Any) -> None:
    _, shelf = learn(2.5, 2.5)
    base = digest(HEAD / WEIGHTS)
    for each, verdict in zip(shelf.each(base), (KEPT, REFUSED)):
        shelf.judge(each, verdict)
    run, _ = learn(2.5)
    assert run.asked[0].start_from.endswith("heads/000001")
    for each in shelf.each(base):
        shelf.judge(each, REFUSED)
    run, _ = learn(float("nan"))
    assert run.asked[0].start_from == str(HEAD)
    assert len(shelf.each(base)) == 3


def test_a_round_that_fails_is_told_and_another_begins(
    learn: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full, ended = OSError(28, "No space left on device"), SystemExit(1)
    _, shelf = learn(full, ended, ConfigError("--states has no room"), 2.5)
    said = capsys.readouterr().out
    assert "Round 1 failed: OSError: [Errno 28] No space left" in said
    assert "Round 2 failed: SystemExit: 1. Nothing is published." in said
    assert "Round 3 failed: ConfigError: --states has no room" in said
    assert "Round 4: acceptance length 2.600 on held-out texts, 2.100 before: head 1" in said
    assert len(shelf.each(digest(HEAD / WEIGHTS))) == 1
    assert not (tmp_path / "shelf" / ROUND).exists()


def ended(learn: Any, *results: Any, more: Sequence[str] = ()) -> str:
    with pytest.raises(SystemExit) as found:
        learn(*results, more=more)
    return str(found.value.code)


def test_what_is_wrong_from_the_start_ends_the_command(learn: Any, tmp_path: Path) -> None:
    assert ended(learn, KeyboardInterrupt()).startswith("stopped: published heads stay")
    assert "--margin is -1.0: give a number from 0 on" in ended(learn, more=["--margin", "-1"])
    assert "--minutes-per-round is 0.0" in ended(learn, more=["--minutes-per-round", "0"])
    assert "has no model.safetensors" in ended(learn, more=["--head", str(tmp_path)])
    assert "can't be made: NotADirectoryError" in ended(
        learn, more=["--publish", str(HEAD / WEIGHTS / "below")]
    )
    with locked(tmp_path / "shelf" / LOCK) as held:
        assert held
        assert "has a trainer that runs: give another" in ended(learn)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / LOCK).symlink_to(tmp_path / "elsewhere")
    said = ended(learn, more=["--publish", str(tmp_path / "other")])
    assert "can't be locked: OSError: [Errno 40] is a link" in said


def test_records_of_a_clock_that_was_set_back_are_new(
    learn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But nothing is trained on twice, or while the server makes room."""
    written = [5.0, 5.0, 0.0, 4.0]
    monkeypatch.setattr(rounds.Learner, "_newest", lambda self: written.pop(0))
    run, _ = learn(2.5, 2.5)
    assert len(run.asked) == 2
    assert not written


def test_a_trainer_of_a_young_server_says_that_it_waits(
    learn: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) > 2:
            raise KeyboardInterrupt

    for each in (tmp_path / "traffic").iterdir():
        each.unlink()
    monkeypatch.setattr(time, "sleep", sleep)
    assert ended(learn).startswith("stopped: published heads stay")
    assert capsys.readouterr().out == f"Waiting for new records in {tmp_path / 'traffic'}.\n"


def test_a_model_that_no_round_could_train_for_is_refused(tmp_path: Path) -> None:
    (tmp_path / "traffic").mkdir()
    words = ["nothing/here", "--from-traffic", str(tmp_path / "traffic"), "--head", str(HEAD)]
    read, more = rounds.make_parser().parse_known_args([*words, "--publish", str(tmp_path / "p")])
    with pytest.raises(ConfigError, match="MODEL nothing/here"):
        rounds.Learner(read, more).learn()


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_head_learns_from_what_its_server_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole circle: a server records, a trainer publishes, and the server drafts by that."""
    require_cpu_server()
    monkeypatch.setattr(follower, "LOOK_SECONDS", 0.1)
    pair = Pair.load(SHIPPED)
    traffic, shelf = tmp_path / "traffic", tmp_path / "shelf"
    base = write_changed(HEAD, tmp_path / "base", with_noise)
    learn = {"record": str(traffic), "follow": str(shelf), "follow_trees": 300}
    flags, environment = server_settings(SHIPPED, cuda=False)
    environment |= {"OMP_NUM_THREADS": "1"}
    own = ["--rounds", "1", "--minutes-per-round", "9", "--answer-minutes", "0.5", "--steps", "60"]
    own += ["--max-tokens", "40", "--longest", "256", "--batch-tokens", "512", "--passes", "3"]
    asked = [Request(each, {"max_tokens": 40, "temperature": 0}) for each in pair.prompts[:40]]

    def counted() -> Any:
        assert LEARNING.metrics.watch is not None
        return LEARNING.metrics.watch().numbers()

    with pair.engine(nodes=7, draft=str(base), graft={"learn": learn}) as llm:
        expected = answer_all(llm, asked)
        # A thread writes them.
        assert counted()["recorded_requests"] > 30
        told = finished(
            *(sys.executable, "-m", "vllm_graft", "learn", flags[0], *own, "--rate", "3e-3"),
            *("--head", base, "--from-traffic", traffic, "--publish", shelf),
            *("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8"),
            env={**os.environ, **environment},
        )
        assert "head 1 is published" in told, told
        [head] = Publications(shelf).each(digest(base / WEIGHTS))
        assert head.facts.after > head.facts.before + 0.1 > 0.1
        end = time.monotonic() + 120
        while counted()["head_swaps"] == 0 and time.monotonic() < end:
            assert answer_all(llm, asked[:8]) == expected[:8]
        assert answer_all(llm, asked) == expected
        found = counted()
    assert (found["head"], found["head_rollbacks"]) == (1, 0)
    assert found["head_yield"] > found["head_yield_before"] + 0.1
    assert os.listdir(shelf / "heads") == ["000001"]
    assert not (shelf / ROUND).exists()
