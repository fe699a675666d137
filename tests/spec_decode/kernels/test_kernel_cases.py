from __future__ import annotations

from types import ModuleType

import pytest

from tests.support.kernel_cases import (
    compiled,
    history_kernels,
    launched_kernels,
    plan_kernels,
    rare_plans,
    recurrent_kernels,
    tree_kernels,
)
from vllm_graft.spec_decode import kernels, targets

_NIGHTLY = pytest.mark.nightly
ROOMS = (tree_kernels, history_kernels, recurrent_kernels)


def test_every_kernel_has_a_case() -> None:
    cases = {case.function for room in ROOMS for case in room.CASES}
    assert cases == launched_kernels(kernels) | launched_kernels(targets)


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__.rpartition(".")[2])
@pytest.mark.parametrize(
    "capabilities",
    [pytest.param((90,), id="sm_90"), pytest.param((80, 100), id="others", marks=_NIGHTLY)],
)
def test_every_kernel_compiles(room: ModuleType, capabilities: tuple[int, ...]) -> None:
    outcomes = compiled(room, capabilities)
    assert len(outcomes) == len(capabilities) * len(room.CASES)
    assert [(o.name, o.capability, o.error) for o in outcomes if o.error] == []
    # This is the most that a block of the smallest architecture, sm_80, may have: 163 KiB.
    assert max(outcome.shared_bytes for outcome in outcomes) <= 163 << 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("room", "capabilities"),
    [
        pytest.param(plan_kernels, (90,), id="sm_90"),
        pytest.param(plan_kernels, (100,), id="sm_100", marks=_NIGHTLY),
        pytest.param(rare_plans, (90, 100), id="rare", marks=_NIGHTLY),
    ],
)
def test_every_plan_compiles(room: ModuleType, capabilities: tuple[int, ...]) -> None:
    """A kernel that starts while another runs is there from sm_90 on; sm_80 refuses it."""
    outcomes = compiled(room, capabilities)
    assert len(outcomes) == len(capabilities) * len(room.CASES)
    assert [(o.name, o.error) for o in outcomes if o.error] == []
    assert max(outcome.shared_bytes for outcome in outcomes) <= 227 << 10
