"""Every kernel compiles for GPUs; launches as values: equal exactly where Triton compiles once."""

import json
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton

from tests.support.compiling.compiling_process import printed_by
from tests.support.kernel_cases import (
    compiled,
    launched_kernels,
    plan_kernels,
    rare_plans,
    recurrent_kernels,
    tree_kernels,
)
from vllm_graft.spec_decode import kernels, targets
from vllm_graft.spec_decode.kernels.expand import seed_frontier
from vllm_graft.spec_decode.kernels.listed_launch import Launch, Pointer, listing
from vllm_graft.spec_decode.kernels.sizes import cdiv, next_power_of_2
from vllm_graft.spec_decode.kernels.topk import topk_logprobs
from vllm_graft.spec_decode.trees.candidates import CandidateTable

_NIGHTLY = pytest.mark.nightly
ROOMS = (tree_kernels, recurrent_kernels)


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


def test_they_are_triton_s() -> None:
    for number in range(1, 300):
        assert next_power_of_2(number) == triton.next_power_of_2(number)
        for divisor in (1, 2, 3, 64, 100):
            assert cdiv(number, divisor) == triton.cdiv(number, divisor)


KEYS = Path(__file__).parents[2] / "support" / "compiling" / "launch_keys.py"


def test_launches_are_equal_where_triton_compiles_once() -> None:
    """Against Triton's own keys, of real arguments and of what stands for them."""
    printed = printed_by(str(KEYS)).splitlines()
    pairs = Counter(tuple(json.loads(line)) for line in printed)
    assert set(pairs) == {(True, True, True), (False, False, True)}
    # Numbers that share a kind, levels and factors of logits share what is compiled.
    assert pairs[True, True, True] > 32
    assert pairs[False, False, True] > 200


def seeded(device: str, num_reqs: int) -> list[Launch]:
    found: list[Launch] = []
    table = CandidateTable.allocate(4, 4, 3, device)
    with listing(found.append):
        logp, tokens = topk_logprobs(torch.zeros(num_reqs, 640, device=device), 4)
        seed_frontier(table, logp, tokens, num_reqs)
    return found


def test_listed_launches_are_not_made() -> None:
    found = seeded("cpu", 2)
    assert [launch.name for launch in found] == ["_block_kernel", "_merge_kernel", "_seed_kernel"]
    # A row of logits with a clear best token: nothing was written into a new table of zeros.
    table = CandidateTable.allocate(1, 4, 3, "cpu")
    with listing(found.append):
        seed_frontier(table, torch.ones(1, 4), torch.ones(1, 4, dtype=torch.int64), 1)
    assert not table.scores.any()
    seed_frontier(table, torch.ones(1, 4), torch.ones(1, 4, dtype=torch.int64), 1)
    assert table.scores.any()


def test_tensors_without_memory_have_the_launches_of_others() -> None:
    assert seeded("meta", 2) == seeded("cpu", 2)
    assert seeded("meta", 3) == seeded("cpu", 3)


def test_addresses_that_are_no_multiple_of_16_are_told_apart() -> None:
    """Control: half of a buffer of so many rows begins at such an address, on `meta` as well."""
    rows = {num_reqs: dict(seeded("meta", num_reqs)[0].arguments) for num_reqs in (1, 2)}
    assert rows[1]["sums"] == Pointer("float32", False)
    assert rows[2]["sums"] == Pointer("float32", True)


def test_launches_may_be_made_as_well() -> None:
    found: list[Launch] = []
    with listing(found.append, launch=True):
        _, tokens = topk_logprobs(torch.tensor([[0.0, 3.0, 1.0]]), 2)
    assert tokens.tolist() == [[1, 2]]
    assert len(found) == 2
    topk_logprobs(torch.tensor([[0.0, 3.0, 1.0]]), 2)
    assert len(found) == 2
