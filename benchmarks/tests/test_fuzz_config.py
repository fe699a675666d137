"""The fuzz of the configuration on a few inputs, and faults that it has to find."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fuzz.config.__main__ import fuzz, quiet_place
from benchmarks.fuzz.config.frontend import Frontend, vllm_reads
from benchmarks.fuzz.config.inputs import Case, Inputs
from benchmarks.fuzz.config.verdict import problem_of, wrong_message
from vllm_graft import config
from vllm_graft.base import options
from vllm_graft.base.errors import ConfigError, HookError
from vllm_graft.graph_runners.vision.vision_config import VitConfig
from vllm_graft.hooks.manager import Manager
from vllm_graft.spec_decode.config.draft_config import DraftConfig
from vllm_graft.spec_decode.config.tree_config import TreeConfig


@pytest.mark.parametrize("count", [500, pytest.param(1500, marks=pytest.mark.nightly)])
def test_nothing_but_a_config_error_comes_out(count: int) -> None:
    wrong: list[str] = []
    found = fuzz(range(count), seed=25, whole_every=10, report=wrong.append)
    assert wrong == []
    # Both outcomes occur: some inputs are refused, others accepted and built.
    assert found["refused"] > count / 3
    assert found["accepted"] > count / 5


def test_every_key_of_a_section_is_tried() -> None:
    """Negative control: a key that the inputs leave out is named."""
    inputs = Inputs(25, Path("root"))
    for section, make in (
        (TreeConfig, inputs._tree),
        (VitConfig, inputs._vit),
        (DraftConfig, inputs._draft),
    ):
        tried = {key for _ in range(200) for key in make()}
        assert set(section.model_fields) - tried == set()
        assert set(section.model_fields) - (tried - {min(tried)}) == {min(tried)}


def _unknown_to_hooks(self: Manager, hook: str, name: str, path: str) -> Any:
    raise HookError(f"{path}: no {hook} entry is called {name!r}.")


FAULTS: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "errors without their flag": (options, "_explain", lambda *_: "it is wrong"),
    "misplaced keys": (config, "can_only_be_ours", lambda key, value: False),
    "another error": (Manager, "choose", _unknown_to_hooks),
    "values as they are": (options, "shown", repr),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    owner, name, instead = FAULTS[fault]
    monkeypatch.setattr(owner, name, instead)
    wrong: list[str] = []
    fuzz(range(400), seed=26, whole_every=1000, report=wrong.append)
    assert wrong
    # The number in a report makes its input again.
    number = int(wrong[0].split("--only ")[1].split(" ")[0])
    again: list[str] = []
    fuzz(range(number, number + 1), seed=26, whole_every=1000, report=again.append)
    assert again[0].split(":")[0] == wrong[0].split(":")[0]


def test_an_input_is_made_by_its_number(tmp_path: Path) -> None:
    first, other = Inputs(3, tmp_path), Inputs(3, tmp_path)
    other.make(5)
    assert repr(first.make(9).additional)[:200] == repr(other.make(9).additional)[:200]
    kinds = {first.make(number).connector for number in range(50)}
    assert kinds == {None, "HiCacheConnector", "MultiConnector"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--additional-config.graft.tree.topk: 33 is refused.", None),
        ("topk: 33 is refused.", "full flag"),
        ("--additional-config.graft: Traceback (most", "traceback"),
        ("--additional-config.graft: \x1b[2J", "printed"),
        ("--additional-config.graft: " + "x" * 9000, "too long"),
    ],
)
def test_messages_are_judged(text: str, words: str | None) -> None:
    found = wrong_message(text)
    assert found is None if words is None else words in str(found)


def test_a_refusal_is_no_problem_and_another_error_is(tmp_path: Path) -> None:
    def refuse(case: Case) -> None:
        raise ConfigError("--additional-config.graft: 3 is refused.")

    def fail(case: Case) -> None:
        raise SystemExit(3)

    with pytest.raises(ConfigError):
        problem_of(Case(), refuse, tmp_path)
    assert problem_of(Case(), fail, tmp_path) == "SystemExit came out: 3"


def test_stores_are_made_of_accepted_inputs(tmp_path: Path) -> None:
    frontend = Frontend(tmp_path)
    with quiet_place() as root:
        storage = {"backend": "segments", "path": "~/store", "max_bytes": "8MiB"}
        case = Case({}, "HiCacheConnector", {"host_bytes": "64MiB", "storage": storage})
        assert problem_of(case, frontend.quick, root) is None
        (root / "store").write_text("a file is in the way")
        with pytest.raises(ConfigError, match="is no directory"):
            problem_of(case, frontend.quick, root)
    assert vllm_reads(case)
