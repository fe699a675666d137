"""The cost model chooses the fastest way, and learns."""

from dataclasses import replace

import pytest

from vllm_graft.base.errors import ConfigError
from vllm_graft.hicache.planning.cost import (
    PREFILL_LEVER,
    CostModel,
    Hit,
    LoadMode,
    Plan,
    Rate,
    StepClock,
)


def _model(host: float = 50.0, prefill: float = 28_000.0, step: float = 0.01) -> CostModel:
    model = CostModel()
    model.load.value = model.store.value = host * 1e9
    model.disk.value = 6e9
    model.prefill.value = prefill
    model.steps.value = 1 / step
    return model


KIB_A_TOKEN = 131_072
LONG = Hit(tokens=8192, num_bytes=8192 * KIB_A_TOKEN, rest_tokens=512)


def test_alone_a_request_is_loaded_while_it_computes() -> None:
    plan = _model().choose(LONG)
    assert plan.mode is LoadMode.LAYERWISE
    # All tokens are loaded: the link is ten times faster than prefill, so less gains nothing.
    assert plan.tokens == LONG.tokens


def test_where_the_link_is_no_faster_than_prefill_both_share_the_hit() -> None:
    plan = _model(host=5.0).choose(LONG)
    assert plan.mode is LoadMode.LAYERWISE
    # Copying and computing end together.
    assert 0.5 * LONG.tokens < plan.tokens < 0.7 * LONG.tokens


def test_many_others_do_not_wait_for_a_large_load() -> None:
    crowd = Hit(LONG.tokens, LONG.num_bytes, 16, others=64)
    assert _model().choose(crowd).mode is LoadMode.ASYNC
    assert _model().choose(crowd).tokens == LONG.tokens


def test_a_slow_link_is_left_alone() -> None:
    assert _model(host=0.05).choose(LONG) == Plan(LoadMode.RECOMPUTE, 0)
    crowd = replace(LONG, others=8)
    assert _model(host=1.5).choose(crowd) == Plan(LoadMode.ASYNC, LONG.tokens), "others compute"
    shared = _model(host=1.5).choose(LONG)
    assert shared.mode is LoadMode.LAYERWISE
    assert 0.25 * LONG.tokens < shared.tokens < 0.35 * LONG.tokens
    busy = Hit(LONG.tokens, LONG.num_bytes, 512, queued_bytes=1 << 40)
    assert _model().choose(busy).mode is LoadMode.RECOMPUTE


def test_disk_against_prefill() -> None:
    model = _model()
    assert model.worth_reading(LONG.tokens, LONG.num_bytes, 0)
    model.disk.value = 3e9
    assert not model.worth_reading(LONG.tokens, LONG.num_bytes, 0)
    model.disk.value = 6e9
    assert not model.worth_reading(LONG.tokens, LONG.num_bytes, 4 * LONG.num_bytes)


def test_rates_follow_measurements() -> None:
    rate = Rate(1.0, minimum=10)
    rate.observe(9, 1.0)
    rate.observe(100, 0.0)
    assert rate.value == 1.0
    rate.observe(100, 1.0)
    assert rate.value == pytest.approx(100)
    rate.observe(200, 1.0)
    assert 100 < rate.value < 200
    for _ in range(50):
        rate.observe(200, 1.0)
    assert rate.value == pytest.approx(200, rel=1e-3)


def test_what_does_not_come_in_time_counts_as_slow() -> None:
    rate = Rate(100.0, minimum=10)
    rate.at_most(200, 1.0)
    assert rate.value == 100.0, "it may be faster than that"
    values = []
    for _ in range(40):
        rate.at_most(0, 1.0)
        values.append(rate.value)
    assert values == sorted(values, reverse=True)
    assert 0 < values[-1] < 2
    rate.observe(100, 1.0)
    assert rate.value > values[-1]


def test_stores_stand_for_the_link_until_a_load_is_measured() -> None:
    model = _model(host=20.0)
    model.copied(50 << 30, 1.0, load=False)
    assert model.load.value == model.store.value == 50 << 30
    model.copied(40 << 30, 1.0, load=True)
    model.copied(60 << 30, 1.0, load=False)
    assert model.load.value == 40 << 30


def test_steps_are_known_by_their_numbers() -> None:
    times = StepClock()
    prefill, untold, decode, late = (times.begin(tokens) for tokens in (8192, 0, 4, 16))
    assert times.ended({prefill: 0.2, untold: 0.05}) == [(8192, 0.2)]
    # The step before it was never reported, and never will be.
    assert times.ended({late: 0.01}) == [(16, 0.01)]
    assert times.ended({decode: 0.01}) == []


def test_rates_weigh_times_not_ratios() -> None:
    rate = Rate(1.0, minimum=10)
    for _ in range(50):
        # That is 200 in 2 seconds. The mean of both ratios would be over 500.
        rate.observe(100, 1.9)
        rate.observe(100, 0.1)
    assert rate.value == pytest.approx(100, rel=0.3)


def test_small_steps_tell_nothing_of_prefill() -> None:
    model = _model()
    model.computed(64, 0.006)
    model.computed(4000, 0.1)
    assert model.steps.value == pytest.approx(1 / 0.006)
    assert model.prefill.value == pytest.approx(40_000)


def test_requests_of_one_step_share_its_time() -> None:
    model = _model()
    # Four such loads take longer than one such prompt, but less time than four.
    hit = Hit(2048, 2048 * KIB_A_TOKEN, 160, others=8)
    queued = Hit(2048, 2048 * KIB_A_TOKEN, 160, others=8, queued_bytes=3 * hit.num_bytes)
    assert model.choose(hit).mode is LoadMode.LAYERWISE
    assert model.choose(queued).mode is LoadMode.ASYNC
    together = replace(queued, step_tokens=3 * 160)
    assert model.choose(together) == Plan(LoadMode.LAYERWISE, 2048)


def test_a_small_load_does_not_leave_a_full_step() -> None:
    """Many turns that come at once are loaded in the step that computes them, not one by one."""
    turn = Hit(432, 432 * KIB_A_TOKEN, 400, others=22)
    for before in range(16):
        hit = replace(turn, queued_bytes=before * turn.num_bytes, step_tokens=before * 400)
        assert _model(prefill=38_000.0).choose(hit) == Plan(LoadMode.LAYERWISE, 432)


def test_the_environment_makes_all_hits_worth_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, num_bytes = 64, 64 << 20
    assert not CostModel().worth_reading(tokens, num_bytes, 0)
    monkeypatch.setenv(PREFILL_LEVER, "10")
    assert CostModel().worth_reading(tokens, num_bytes, 0)
    monkeypatch.setenv(PREFILL_LEVER, "fast")
    with pytest.raises(ConfigError, match=f"{PREFILL_LEVER} is 'fast' in the environment"):
        CostModel()
