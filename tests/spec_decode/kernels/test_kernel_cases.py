"""Every kernel compiles for GPUs; launches as values: equal exactly where Triton compiles once."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import triton

from tests.support.compiling.compiling_process import printed_by
from tests.support.compiling.launch_compiler import compiled, launches_in
from tests.support.launches import (
    attention_calls,
    check_kernels,
    check_launches,
    recurrent_calls,
    tree_calls,
    varied,
)
from tests.support.launches.attention_calls import PLANS, RARE_PLANS, Planned
from tests.support.launches.one_branch import one_branch_kernel
from vllm_graft import spec_decode
from vllm_graft.spec_decode.kernels.candidates import seed_frontier
from vllm_graft.spec_decode.kernels.kernel_launch import (
    Launch,
    Pointer,
    cdiv,
    describe,
    listing,
    next_power_of_2,
)
from vllm_graft.spec_decode.kernels.topk import topk_logprobs
from vllm_graft.spec_decode.trees.tree import CandidateTable

_IN_ALL_SIZES = [pytest.param(each, True, marks=pytest.mark.nightly) for each in (80, 90, 100)]


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "sizes"), [(90, False), *_IN_ALL_SIZES])
def test_every_kernel_compiles(capability: int, sizes: bool) -> None:
    calls = [*tree_calls.calls(), *attention_calls.calls(), *recurrent_calls.calls()]
    check_kernels(spec_decode, calls, capability, sizes=sizes)


def test_what_is_compiled_each_day_has_all_branches() -> None:
    def launch(kernel: str, *values: object) -> Launch:
        return Launch(kernel, tuple(zip("abc", values)), ())

    half, whole = Pointer("bfloat16", True), Pointer("float32", True)
    plain, small = launch("f", half, None, 64), launch("f", half, None, 16)
    flagged, other = launch("f", whole, True, 64), launch("g", half, None, 64)
    assert varied([plain, small, flagged, other]) == [small, other, flagged]
    # Control: of three that differ in sizes alone one is left, and it is the smallest.
    assert varied([plain, small, launch("f", half, None, 32)]) == [small]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plans", "capability"),
    [
        pytest.param(PLANS, 90),
        *(
            pytest.param(plans, capability, marks=pytest.mark.nightly)
            for plans, capability in ((PLANS, 100), (RARE_PLANS, 90), (RARE_PLANS, 100))
        ),
    ],
)
def test_every_plan_compiles(plans: Planned, capability: int) -> None:
    """A kernel that starts while another runs is there from sm_90 on; sm_80 refuses it."""
    launches = launches_in(spec_decode, attention_calls.planned(plans))
    check_launches(launches, capability, shared_bytes=227 << 10)


def test_the_compiler_s_errors_are_found() -> None:
    """Control: this kernel runs in the interpreter."""
    one_branch_kernel[(1,)](torch.ones(16), N=16)
    launch = describe(one_branch_kernel, (torch.ones(16),), {"N": 16})
    [outcome] = compiled([launch], 90)
    assert "not defined" in outcome.error


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
