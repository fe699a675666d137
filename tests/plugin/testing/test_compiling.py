from pathlib import Path

import pytest

from vllm_graft.base.errors import GraftError
from vllm_graft.testing import compile_cases

CASES_FILE = Path(__file__).with_name("kernel_cases.py")


def test_compiler_takes_good_kernels_and_rejects_what_the_interpreter_accepts():
    outcomes = compile_cases(CASES_FILE)
    assert [(outcome.name, outcome.capability) for outcome in outcomes] == [
        (name, capability) for name in ("walk", "one branch") for capability in (80, 90, 100)
    ]
    good, bad = outcomes[:3], outcomes[3:]
    assert [outcome.error for outcome in good] == [None] * 3
    assert all("not defined" in (outcome.error or "") for outcome in bad)


def test_module_that_does_not_import_is_an_error():
    with pytest.raises(GraftError, match="No module named 'no_such_module'"):
        compile_cases("no_such_module")
