"""Two servers beside one: what is asked of them, what is compared, and the planted fault."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import split
from tests.support.engines.pairs import Pair
from tests.support.engines.shipped_pair import SHIPPED


def test_dialogues_are_a_function_of_the_seed() -> None:
    pair = Pair.load(SHIPPED)
    one, other = (split.dialogues(pair, 6, 2, seed) for seed in (0, 1))
    assert one == split.dialogues(pair, 6, 2, 0) != other
    assert {"stop", "seed"} <= {key for each in one for key in each.params}


def test_a_prefiller_gets_what_the_decoder_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, list[int], dict[str, Any] | None]] = []

    def ask(server: str, prompt: list[int], **body: Any) -> dict[str, Any]:
        params = body.get("kv_transfer_params")
        seen.append((server, list(prompt), params))
        assert (server == "prefiller") == (body["max_tokens"] == 1)
        return {"choices": [{"token_ids": [9]}], "kv_transfer_params": {"from": server}}

    monkeypatch.setattr(split, "ask", ask)
    monkeypatch.setattr(split, "tokens", lambda server, text, begins: [len(text)])
    servers: Any = ("prefiller", "decoder")
    asked = split.Dialogue(("a", "bc"), {"max_tokens": 5})
    assert split.answer(servers, asked) == [[9], [9]]
    first = {"do_remote_decode": True, "do_remote_prefill": False}
    assert seen == [
        ("prefiller", [1], first),
        ("decoder", [1], {"from": "prefiller"}),
        ("prefiller", [1, 9, 2], {"from": "decoder", **first}),
        ("decoder", [1, 9, 2], {"from": "prefiller"}),
    ]


@pytest.mark.parametrize(
    ("answers", "acceptance", "foreign", "status"),
    [
        ([[[1]]], 2.0, 8.0, 0),
        ([[[2]]], 2.0, 8.0, 1),
        ([[[1]]], 1.9, 8.0, 1),
        ([[[1]]], 2.0, 0.0, 1),
    ],
)
def test_what_fails(
    answers: list[list[list[int]]],
    acceptance: float,
    foreign: float,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    alone = SimpleNamespace(answers=[[[1]]], acceptance=2.0, foreign=0.0)
    apart = SimpleNamespace(answers=answers, acceptance=acceptance, foreign=foreign)
    monkeypatch.setattr(split, "with_servers", lambda *_, split: apart if split else alone)
    assert split.main([str(SHIPPED), "--requests", "1", "--out", str(tmp_path)]) == status
    assert json.loads(capsys.readouterr().out)["foreign_tokens"] == foreign


def test_the_fault_takes_both_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_graft.spec_decode import tree_part

    wraps: list[Any] = [vars(tree_part)[name] for name in ("count_accepted", "hold_saves")]
    for wrap in wraps:
        monkeypatch.setattr(tree_part, wrap.__name__, wrap)
    folder = split.faulty(tmp_path)
    runpy.run_path(str(folder / "split_fault.py"))["plant"]()
    for wrap in wraps:
        planted = vars(tree_part)[wrap.__name__]
        assert planted is not wrap
        assert planted(object()) is None
