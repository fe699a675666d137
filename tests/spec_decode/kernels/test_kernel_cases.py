from __future__ import annotations

import pytest

import vllm_graft.spec_decode.kernels as kernels
from vllm_graft.testing import compile_cases
from vllm_graft.testing.compiling import launched_kernels
from vllm_graft.testing.kernel_cases.tree_kernels import CASES


def test_every_kernel_has_a_case() -> None:
    assert {case.function for case in CASES} == launched_kernels(kernels)


@pytest.mark.slow
def test_every_kernel_compiles() -> None:
    outcomes = compile_cases("vllm_graft.testing.kernel_cases.tree_kernels")
    assert len(outcomes) == 3 * len(CASES)
    assert [(o.name, o.capability, o.error) for o in outcomes if o.error] == []
    # This is the most that a block of the smallest architecture, sm_80, may have: 163 KiB.
    assert max(outcome.shared_bytes for outcome in outcomes) <= 163 << 10
