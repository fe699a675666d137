"""Which finished requests are recorded, by whose thread, and what is refused."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graft.config import GraftConfig
from vllm_graft.learn import recorder
from vllm_graft.learn.learn_config import LearnConfig
from vllm_graft.learn.learn_part import LEARNING
from vllm_graft.learn.recorder import Recorder
from vllm_graft.learn.records import Records


def until(happens: Callable[[], bool]) -> bool:
    end = time.monotonic() + 30
    while not happens() and time.monotonic() < end:
        time.sleep(0.001)
    return happens()


def request(prompt: Any = (1, 2), answer: Any = (3,), **values: Any) -> Any:
    plain = {"cache_salt": None, "lora_request": None, "mm_features": [], "resumable": False}
    return SimpleNamespace(prompt_token_ids=prompt, output_token_ids=answer, **{**plain, **values})


def section(folder: Path, **values: Any) -> LearnConfig:
    found = GraftConfig.parse({"learn": {"record": str(folder), **values}}).learn
    assert found is not None
    return found


def recorded(made: Recorder) -> Any:
    return made.numbers()["recorded_requests"]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"cache_salt": "tenant"}, "salted"),
        ({"lora_request": object()}, "adapter"),
        ({"mm_features": [object()]}, "not_text"),
        ({"prompt": None}, "not_text"),
        ({"resumable": True}, "not_text"),
        ({"prompt": range(2**13)}, "long"),
    ],
)
def test_what_a_head_can_t_learn_from_is_left_out(
    tmp_path: Path, values: dict[str, Any], reason: str
) -> None:
    made = Recorder(section(tmp_path / "traffic", record_bytes="1MiB"))
    made.take(request(**values))
    made.take(request())
    assert until(lambda: recorded(made) == 1)
    left = {name: count for name, count in made.numbers()["left_out_requests"].items() if count}
    assert left == {reason: 1}
    assert made.numbers()["recorded_tokens"] == 3
    assert (tmp_path / "traffic").stat().st_mode & 0o777 == 0o700


def test_salted_requests_are_recorded_where_that_is_asked_for(tmp_path: Path) -> None:
    made = Recorder(section(tmp_path, record_salted=True))
    made.take(request(cache_salt="tenant"))
    assert until(lambda: recorded(made) == 1)


def test_a_slow_or_failing_disk_costs_records_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "WAITING_TOKENS", 10)
    held = [True]

    def write(self: Records, prompt: Any, answer: Any) -> None:
        while held[0]:
            time.sleep(0.001)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Records, "write", write)
    made = Recorder(section(tmp_path))
    for _ in range(5):
        made.take(request())
    held[0] = False
    assert until(lambda: made.numbers()["left_out_requests"]["failed"] == 3)
    assert made.numbers()["left_out_requests"]["behind"] == 2
    monkeypatch.undo()
    made.take(request())
    assert until(lambda: recorded(made) == 1)


class Scheduler:
    """A scheduler whose step finishes what `ends` names, and frees it."""

    def __init__(self, requests: dict[str, Any], ends: set[str]) -> None:
        self.requests, self._ends = requests, ends

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> str:
        for name in self._ends & self.requests.keys():
            self.requests.pop(name).done = True
        return "outputs"


def test_a_scheduler_hands_over_what_it_finishes(tmp_path: Path) -> None:
    requests = {}
    for number, name in enumerate(("goes on", "ends", "waits")):
        requests[name] = asked = request((number,), (number,), done=False)
        asked.is_finished = lambda asked=asked: asked.done
    scheduler: Any = Scheduler(dict(requests), {"ends"})
    made = recorder.record(scheduler, section(tmp_path))
    ran = SimpleNamespace(num_scheduled_tokens={"goes on": 1, "ends": 1, "aborted": 1})
    assert scheduler.update_from_output(ran, None) == "outputs"
    assert until(lambda: recorded(made) == 1)
    [file] = tmp_path.iterdir()
    assert json.loads(file.read_text()) == {"prompt_token_ids": [1], "token_ids": [1]}


def problems_of(values: Any, speculative: Any, runner: str = "generate") -> list[str]:
    """What rules a section out."""
    model = SimpleNamespace(runner_type=runner)
    config = SimpleNamespace(model_config=model, speculative_config=speculative)
    return [*LEARNING.refuses(GraftConfig.parse({"learn": values}).learn, config)]


def problems(folder: Path, runner: str = "generate") -> list[str]:
    return problems_of({"record": str(folder)}, None, runner)


def test_a_folder_that_others_may_read_is_refused(tmp_path: Path) -> None:
    open_folder, file, own = tmp_path / "open", tmp_path / "file", tmp_path / "own"
    open_folder.mkdir(mode=0o755)
    own.mkdir(mode=0o700)
    file.touch()
    [found] = problems(open_folder)
    assert f"--additional-config.graft.learn.record is '{open_folder}': its mode is 755" in found
    assert "chmod 700" in found
    assert "is no directory" in problems(file)[0]
    assert f"{file} is no directory" in problems(file / "below")[0]
    assert problems(own) == problems(tmp_path / "new" / "one") == []
    assert "They write no answers" in problems(own, "pooling")[0]
