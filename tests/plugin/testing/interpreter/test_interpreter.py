import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_graft import testing

if torch.cuda.is_available():
    pytest.skip("the interpreter is for machines without GPU", allow_module_level=True)


def load(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


checks, operands = load("interpreter_checks"), load("interpreter_operands")


def in_stock(module, *arguments):
    """Return the module's output in the stock interpreter."""
    command = [sys.executable, "-P", "-W", "ignore", module.__file__, *arguments]
    stock = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(stock.stdout)


@pytest.mark.parametrize("name", checks.CHECKS)
def test_interpreter_computes_what_a_gpu_does(name):
    assert checks.CHECKS[name]()


@pytest.mark.nightly
def test_stock_interpreter_is_wrong_exactly_where_we_mend():
    """This is a negative control, and it fails when Triton has fixed a cause, so a mend can go."""
    assert in_stock(checks) == [n for n in checks.CHECKS if not n.startswith("sound_")]


@pytest.mark.parametrize(
    "names",
    [
        ("uint8", "int32", "fp16", "fp32"),
        pytest.param([*operands.TYPES], marks=pytest.mark.nightly),
    ],
)
def test_types_shapes_and_values_are_those_of_stock(names):
    """The mended interpreter's cheaper operations give the same results, errors included."""
    found = operands.table(names)
    assert found == in_stock(operands, *names)
    kinds = {kind for noted in found.values() for kind, *_ in noted}
    assert "InterpreterError" in kinds
    assert len(kinds) > 3 * len(names)


def run(code):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_install_twice_is_one_installation():
    from triton.runtime.interpreter import InterpreterBuilder

    from vllm_graft.testing import install

    before = InterpreterBuilder.binary_op
    install()
    assert InterpreterBuilder.binary_op is before


def test_install_after_triton_is_refused():
    child = run("import triton; import vllm_graft.testing as t; t.install()")
    assert child.returncode
    assert "InterpreterTooLateError: triton was imported before" in child.stderr


def test_names_are_lazy():
    child = run(
        "import sys, vllm_graft.testing as t\n"
        "assert not {'torch', 'triton', 'vllm', 'numpy'} & set(sys.modules)\n"
    )
    assert child.returncode == 0, child.stderr
    assert all(getattr(testing, name) for name in testing.__all__)
