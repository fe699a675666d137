from __future__ import annotations

import ast
from pathlib import Path

import pytest

import vllm_graft.graph_runners.vit.fused as fused
from vllm_graft.graph_runners.vit.fused.cases import CASES
from vllm_graft.testing import compile_cases


def test_every_kernel_has_a_case() -> None:
    jitted = {
        f"{fused.__name__}.{file.stem}:{node.name}"
        for file in Path(fused.__path__[0]).glob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    assert {case.function for case in CASES} == jitted


@pytest.mark.slow
def test_every_kernel_compiles() -> None:
    outcomes = compile_cases(f"{fused.__name__}.cases")
    assert len(outcomes) == 3 * len(CASES)
    assert [(o.name, o.capability, o.error) for o in outcomes if o.error] == []
