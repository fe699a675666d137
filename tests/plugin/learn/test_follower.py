"""Which head drafts when: the follower with workers of its own, and a folder."""

import contextlib
import os
import shutil
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.plugin.learn.test_recorder import problems_of
from vllm_graft.base.errors import ConfigError, GraftError
from vllm_graft.learn import follower
from vllm_graft.learn.follower import LOOK_SECONDS, Follower, watch
from vllm_graft.learn.publications import KEPT, REFUSED, WEIGHTS, Facts, Publications

SIZE = 100


class Workers:
    """Two ranks that read at once, but what is `slow`, and say of what is `bad` why."""

    def __init__(self) -> None:
        self.bad, self.slow = dict[int, str](), set[int]()
        self.told: list[tuple[Any, ...]] = []
        self.fails = False
        self.unfit = set[int]()
        """Heads that the second rank fails to swap in."""
        self.heads = set[str]()
        """The names of all that were asked about."""

    def ask(self, method: str, head: str, *args: Any) -> list[tuple[Any, str]]:
        self.heads.add(head)
        number = int(head.partition("@")[0])
        if method == "problem":
            first = None if number in self.slow else ""
            return [(first, ""), (self.bad.get(number, ""), "")]
        if self.fails:
            return [(None, ""), (None, "no memory is left")]
        self.told.append((method, number, *args))
        fails = method == "swap" and number in self.unfit
        return [(None, ""), (None, "no memory is left" if fails else "")]

    @property
    def swaps(self) -> list[int]:
        return [order[1] for order in self.told if order[0] == "swap"]


class Served:
    """A follower of a folder, whose steps have a yield."""

    def __init__(self, folder: Path) -> None:
        self.shelf, self.workers, self.now = Publications(folder), Workers(), 0.0
        self.made = Follower(self.shelf, "base", self.workers.ask, SIZE, lambda: self.now)
        self.head = folder / WEIGHTS

    def publish(self, base: str = "base") -> None:
        self.head.parent.mkdir(exist_ok=True)
        self.head.write_text("numbers")
        self.shelf.publish([self.head], Facts(base, 0, 1.5, 1.6, 60.0))

    def serve(self, tokens: int, trees: int) -> None:
        """So many trees, each of which yields so many tokens."""
        for _ in range(trees):
            with contextlib.suppress(OSError):
                self.made.look()
            self.made.step()
            scheduled = SimpleNamespace(scheduled_spec_decode_tokens={"a": [0] * 7, "gone": [0]})
            sampled = SimpleNamespace(
                sampled_token_ids=[[], [1] * tokens], req_id_to_index={"b": 0, "a": 1}
            )
            self.made.count(scheduled, sampled)
            self.now += LOOK_SECONDS

    @property
    def verdicts(self) -> list[str]:
        return [each.verdict for each in self.shelf.each("base")]

    def __getitem__(self, name: str) -> Any:
        return self.made.numbers()[name]


@pytest.fixture
def served(tmp_path: Path) -> Served:
    found = Served(tmp_path / "shelf")
    found.made.begin("base")
    return found


def test_a_better_head_stays(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    served.publish("another")
    served.publish()
    served.serve(2, 5)
    # Too few trees to compare with.
    assert served.workers.told == []
    served.serve(2, 10)
    assert served.workers.swaps == [2]
    served.serve(3, SIZE + 20)
    assert served.verdicts == [KEPT]
    assert served.workers.told == [
        ("read", 2, str(served.shelf.each("base")[0].weights)),
        ("swap", 2),
        ("keep", 2),
    ]
    assert (served["head"], served["head_swaps"], served["head_rollbacks"]) == (2, 1, 0)
    assert (served["head_yield_before"], served["head_yield"]) == (2.0, 3.0)
    assert served["head_trained_seconds"] == 60.0


def test_a_worse_head_goes_soon_and_for_good(served: Served) -> None:
    served.publish()
    served.serve(3, 12)
    assert served.workers.swaps == [1]
    served.serve(1, 12)
    assert served.workers.swaps == [1, 0]
    served.serve(3, 2 * SIZE)
    assert served.workers.swaps == [1, 0]
    assert served.verdicts == [REFUSED]
    assert (served["head"], served["head_rollbacks"]) == (0, 1)
    # The next one is compared with the head before, and what that yielded.
    served.publish()
    served.serve(3, SIZE + 20)
    assert served.workers.swaps == [1, 0, 2]
    assert served.verdicts == [REFUSED, KEPT]


def test_a_head_that_no_rank_can_have_is_not_swapped_in(served: Served) -> None:
    served.publish()
    served.workers.bad[1] = "ValueError: fc.weight has numbers that are NaN or infinite"
    served.serve(2, 40)
    assert served.workers.swaps == []
    assert served.verdicts == [REFUSED]
    assert served["unfit_heads"] == 1


def test_all_ranks_have_read_a_head_before_one_swaps(served: Served) -> None:
    served.publish()
    served.workers.slow.add(1)
    served.serve(2, 40)
    assert served.workers.swaps == []
    served.workers.slow.clear()
    served.serve(2, 2)
    assert served.workers.swaps == [1]


def test_a_folder_that_can_t_be_written_changes_nothing_else(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.publish()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Publications, "judge", full)
    served.serve(3, 12)
    served.serve(1, 12)
    served.serve(3, SIZE)
    assert served.workers.swaps == [1, 0]
    assert served.verdicts == [""]
    # Once there is room, the verdict is noted.
    monkeypatch.undo()
    served.serve(3, 2)
    assert served.verdicts == [REFUSED]


def test_what_fails_leaves_the_head_that_drafts(served: Served) -> None:
    served.publish()
    served.workers.fails = True
    served.serve(2, 40)
    assert served["head"] == 0
    served.workers.fails = False
    served.serve(2, 40)
    assert served.workers.swaps == []


def test_all_ranks_go_back_if_one_fails_to_swap(served: Served) -> None:
    served.publish()
    served.workers.unfit = {1}
    served.serve(2, 40)
    assert served.workers.swaps == [1, 0]
    assert (served["head"], served["head_swaps"]) == (0, 0)


def test_ranks_that_can_t_go_back_stop_the_server(served: Served) -> None:
    """They would draft different trees."""
    served.publish()
    served.workers.unfit = {0, 1}
    with pytest.raises(GraftError, match="head 0 not back"):
        served.serve(2, 40)


def test_a_head_that_goes_while_it_is_judged_is_passed_over(served: Served) -> None:
    served.publish()
    served.serve(2, 12)
    shutil.rmtree(served.shelf.each("base")[0].folder)
    served.serve(2, SIZE + 20)
    assert served["head"] == 1
    assert served.verdicts == []


@pytest.mark.parametrize("tokens", [3, 1])
def test_heads_of_an_emptied_folder_are_new_ones(served: Served, tokens: int) -> None:
    """Their numbers begin again, whether the one of that number was kept or refused."""
    for _ in range(2):
        served.publish()
        served.serve(2, 12)
    served.serve(tokens, SIZE + 20)
    before = served.workers.swaps
    shutil.rmtree(served.head.parent / "heads")
    served.publish()
    served.serve(3, 3 * SIZE)
    assert served.workers.swaps == [*before, 1]
    assert served.verdicts == [KEPT]
    # Both of number 1 had a name of their own in the workers.
    assert len(served.workers.heads) == 4


def test_no_older_head_is_followed_when_another_server_refuses_the_one_that_drafts(
    tmp_path: Path,
) -> None:
    first = Served(tmp_path)
    for _ in range(2):
        first.publish()
    head = first.shelf.each("base")[1]
    first.shelf.judge(head, KEPT)
    second = Served(tmp_path)
    second.made.begin("base")
    first.shelf.judge(head, REFUSED)
    second.serve(2, 40)
    assert second.workers.swaps == [2]
    second.publish()
    second.serve(2, 12)
    assert second.workers.swaps == [2, 3]


def test_a_server_begins_with_the_newest_head_that_was_kept(tmp_path: Path) -> None:
    first = Served(tmp_path)
    for verdict in (KEPT, KEPT, REFUSED, ""):
        first.publish()
        if verdict:
            first.shelf.judge(first.shelf.each("base")[-1], verdict)
    second = Served(tmp_path)
    second.made.begin("base")
    assert second.workers.told == [
        ("read", 2, str(second.shelf.each("base")[1].weights)),
        ("swap", 2),
        ("keep", 2),
    ]
    # One that nobody has judged is swapped in while serving, to be compared.
    second.serve(2, 12)
    assert second.workers.swaps == [2, 4]


def test_the_thread_ends_with_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "LOOK_SECONDS", 0.001)
    (tmp_path / "heads").write_text("not a folder, which is told")
    made = Follower(Publications(tmp_path), "base", Workers().ask, SIZE)
    thread = threading.Thread(target=watch, args=(weakref.ref(made),), daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    del made
    thread.join(10)
    assert not thread.is_alive()


def test_a_base_that_can_t_be_read_is_told(tmp_path: Path) -> None:
    served = Served(tmp_path)
    served.workers.bad[0] = "ValueError: fc.weight is not whole"
    with pytest.raises(ConfigError, match=r"graft\.learn\.follow asks .*fc\.weight is not whole"):
        served.made.begin("/models/head/model.safetensors")


def drafts(model: Path, method: str = "eagle3", quantization: str | None = None) -> Any:
    draft = SimpleNamespace(model=str(model), quantization=quantization)
    return SimpleNamespace(method=method, draft_model_config=draft)


def test_what_can_t_follow_is_refused_before_a_model_loads(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).touch()
    (tmp_path / "bare").mkdir()
    folder = {"follow": str(tmp_path / "new")}

    def said(speculative: Any, values: Any = folder) -> str:
        return " ".join(problems_of(values, speculative))

    assert said(drafts(tmp_path)) == ""
    assert "and nothing drafts" in said(None)
    assert "method is 'mtp'" in said(drafts(tmp_path, "mtp"))
    assert "quantization is 'fp8'" in said(drafts(tmp_path, quantization="fp8"))
    assert f"model is '{tmp_path / 'bare'}', without one" in said(drafts(tmp_path / "bare"))
    assert said(drafts(Path("org/head"))) == ""
    assert "which is a file" in said(drafts(tmp_path), {"follow": str(tmp_path / WEIGHTS)})
    assert os.listdir(tmp_path / "bare") == []
    with pytest.raises(ConfigError, match="give record, follow, or both"):
        problems_of({"follow_trees": 100}, None)
