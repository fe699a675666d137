"""The last line of a benchmark: whose command it names, and what it claims."""

from __future__ import annotations

import pytest

from vllm_graft.bench.common.arm import Row, advice

COMMANDS = {name: f"vllm serve {name}" for name in ("none", "chain:3", "graft", "graft --more")}


def rows(name: str = "tokens_per_second", **speeds: list[float]) -> list[Row]:
    named = {"none": "none", "chain": "chain:3", "graft": "graft", "more": "graft --more"}
    return [
        Row(named[arm], {"requests_in_flight": load}, {name: value})
        for arm, values in speeds.items()
        for load, value in enumerate(values, 1)
    ]


def test_ours_is_named_where_it_is_faster() -> None:
    # One command serves all loads: stock's best is the best over both.
    found = rows(none=[100, 400], chain=[200, 300], graft=[300, 400], more=[1, 1])
    assert advice(found, COMMANDS) == (
        "use this command: vllm serve graft (1.41 x stock's best, chain:3; "
        "1.00 to 1.50 x load by load)"
    )
    assert advice(rows(chain=[200], graft=[300]), COMMANDS) == (
        "use this command: vllm serve graft (1.50 x stock's best, chain:3)"
    )


@pytest.mark.parametrize("graft", [101.0, 80.0])
def test_stock_is_named_where_ours_is_no_faster(graft: float) -> None:
    assert advice(rows(none=[100], chain=[90], graft=[graft]), COMMANDS) == (
        "use this command: vllm serve none "
        f"(none, stock's best: ours, graft, is no faster, {graft / 100:.2f} x)"
    )


def test_of_times_the_shorter_one_is_faster() -> None:
    found = rows("encoder_ms", none=[10, 10], graft=[5, 8])
    assert "vllm serve graft (1.58 x stock's best, none; 1.25 to 2.00 x" in advice(found, COMMANDS)


def test_an_arm_that_lacks_a_load_is_no_candidate() -> None:
    found = rows(none=[100, 100], chain=[90, 90], graft=[300])
    assert advice(found, COMMANDS) == (
        "use this command: vllm serve none (none; nothing was compared with it)"
    )
    assert advice([], COMMANDS).startswith("no arm served all loads")
    # It still counts where it was faster.
    found = rows(none=[100, 100], chain=[400], graft=[200, 200])
    assert "0.50 to 2.00 x load by load" in advice(found, COMMANDS)
