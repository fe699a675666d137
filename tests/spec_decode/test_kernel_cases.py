from __future__ import annotations

import ast
from pathlib import Path

import pytest

import vllm_graft.spec_decode.kernels as kernels
from vllm_graft.spec_decode.kernels.cases import CASES
from vllm_graft.testing import compile_cases


def jitted() -> set[str]:
    """Launched kernels of the package: ``module:function`` of each jitted ``*_kernel``."""
    return {
        f"{kernels.__name__}.{file.stem}:{node.name}"
        for file in Path(kernels.__path__[0]).glob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


def test_every_kernel_has_a_case() -> None:
    assert {case.function for case in CASES} == jitted()


@pytest.mark.slow
def test_every_kernel_compiles() -> None:
    outcomes = compile_cases("vllm_graft.spec_decode.kernels.cases")
    assert len(outcomes) == 3 * len(CASES)
    assert [(o.name, o.capability, o.error) for o in outcomes if o.error] == []
    # What a block of the smallest of these architectures may have, sm_80's 163 KiB.
    assert max(outcome.shared_bytes for outcome in outcomes) <= 163 << 10
