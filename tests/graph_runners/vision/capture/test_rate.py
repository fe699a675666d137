"""The share of the wall time that captures take."""

from __future__ import annotations

import pytest

from vllm_graft.config import VitConfig
from vllm_graft.graph_runners.vision.capture.rate import TimeShare


@pytest.mark.parametrize("cost", [0.02, 0.05, 0.3])
def test_captures_stay_within_their_share_from_the_first_second_on(cost: float) -> None:
    rate = TimeShare(share=VitConfig().capture_share, burst=0.2)
    assert rate.share < 0.02
    rate.start(100.0)
    now, spent, worst = 0.0, 0.0, 0.0
    for _ in range(20000):
        if rate.ready(100.0 + now):
            rate.spent(cost)
            spent += cost
            now += cost
            worst = max(worst, spent - 0.02 * now)
        now += 0.005
    # The length of the first capture is not known, and credit never exceeds the burst.
    assert worst <= max(0.0, cost - 0.05)
    assert spent >= 0.9 * 0.019 * now - cost


def test_an_unusually_long_capture_is_paid_back() -> None:
    rate = TimeShare(share=0.02, burst=0.2)
    rate.start(0.0)
    assert not rate.ready(2.4)
    assert rate.ready(2.6)
    rate.spent(0.15)
    assert not rate.ready(12.4)  # It owes 0.1 seconds, and then needs credit for the next.
    assert rate.ready(15.1)


def test_credit_of_an_idle_time_is_bounded() -> None:
    rate = TimeShare(share=0.01, burst=0.2)
    rate.start(0.0)
    assert not rate.plenty
    captures = 0
    while rate.ready(1e6):
        assert rate.plenty == (captures == 0)
        rate.spent(0.05)
        captures += 1
    assert captures == 4


def test_no_share_is_never_and_all_of_it_always() -> None:
    assert not TimeShare(0.0).ready(1e9)
    everything = TimeShare(1.0)
    everything.start(0.0)
    everything.spent(10.0)
    assert everything.ready(0.0)
    assert everything.plenty


def test_a_capture_longer_than_the_burst_happens() -> None:
    rate = TimeShare(share=0.1, burst=0.2)
    rate.spent(1.0)
    assert not rate.ready(0.0)
    assert rate.ready(20.0)
