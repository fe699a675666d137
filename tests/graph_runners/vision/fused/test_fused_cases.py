from __future__ import annotations

import pytest

import vllm_graft.graph_runners.vision.fused as fused
from tests.support.kernel_cases import compiled, launched_kernels, vision_kernels


def test_every_kernel_has_a_case() -> None:
    assert {case.function for case in vision_kernels.CASES} == launched_kernels(fused)


@pytest.mark.slow
def test_every_kernel_compiles() -> None:
    outcomes = compiled(vision_kernels)
    assert len(outcomes) == 3 * len(vision_kernels.CASES)
    assert [(o.name, o.capability, o.error) for o in outcomes if o.error] == []
