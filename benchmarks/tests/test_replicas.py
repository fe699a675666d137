"""Turns of sessions that are not sticky: every pool gets the same ones, and each goes on."""

from benchmarks.replicas import PAUSE, turns_of
from vllm_graft.bench.hicache.cache_parts import Sizes

SIZES = Sizes(sessions=6, turns=3, history=50, history_max=200, turn_tokens=20, reply=4, rate=2.0)


def test_each_turn_goes_on_where_its_session_was() -> None:
    found = turns_of(SIZES, replicas=3)
    assert found == turns_of(SIZES, replicas=3)
    assert all(len(turns) > 1 for turns in found)
    assert sum(map(len, found)) == 6 * 3
    assert all(turns == sorted(turns, key=lambda turn: turn.at) for turns in found)
    ordered = sorted((turn for turns in found for turn in turns), key=lambda turn: turn.at)
    sessions: list[list[float]] = []
    texts: list[list[int]] = []
    for turn in ordered:
        before = [n for n, text in enumerate(texts) if turn.prompt[: len(text)] == text]
        if not before:
            assert 50 <= len(turn.prompt) <= 200
            texts.append(turn.prompt)
            sessions.append([turn.at])
            continue
        [session] = before
        assert len(turn.prompt) == len(texts[session]) + 24
        assert turn.at - sessions[session][-1] > PAUSE
        texts[session] = turn.prompt
        sessions[session].append(turn.at)
    assert sorted(map(len, sessions)) == [3] * 6


def test_turns_end_in_time() -> None:
    some = turns_of(Sizes(sessions=50, turns=9, history=20, history_max=30, rate=1.0), 2)
    assert all(turn.at < 60 for turns in some for turn in turns)
