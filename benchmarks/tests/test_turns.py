"""The simulated world of sessions: who hits, and who waits."""

import json

import pytest

from benchmarks import turns


def lines(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, float]]:
    sizes = ["--sessions", "12", "--turns", "3", "--gpu-tokens", "4096", "--turn-tokens", "256"]
    turns.main([*words, *sizes, "--reply", "16", "--host-gib", "4"])
    found = map(
        json.loads, filter(lambda line: line[0] == "{", capsys.readouterr().out.split("\n")[:-1])
    )
    return {each["arm"]: each for each in found}


@pytest.mark.slow
def test_sessions_that_the_host_holds_are_loaded_in_the_step_that_computes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = lines(capsys, "--arms", "none", "native", "ours")
    none, native, ours = (found[name] for name in ("none", "native", "ours"))
    assert none["hit_rate"] < 0.2 < native["hit_rate"] == pytest.approx(ours["hit_rate"], abs=0.05)
    assert none["turns_per_second"] < native["turns_per_second"] < ours["turns_per_second"]
    assert ours["loads within steps"] > ours["loads outside"]
    assert native["loads outside"] > 0
    assert not any(each["errors"] for each in found.values())
