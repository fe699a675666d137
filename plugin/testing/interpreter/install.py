"""Triton's interpreter as the CPU back end of vLLM.

Model Runner V2 runs on a CPU if ``triton.backends.backends`` has an entry ``cpu``
(``vllm.triton_utils.HAS_TRITON``). The Triton of PyPI has none. :func:`install` adds
one that compiles nothing, switches the interpreter on, and mends its known defects (``numerics``,
``syntax``) and its costs (``launch``, ``types``, ``operators``)."""

import os
import sys

from vllm_graft.base.errors import GraftError


class InterpreterTooLateError(GraftError):
    """Triton or vLLM was imported before the interpreter was switched on."""


def installed() -> bool:
    """Whether :func:`install` has run in this process."""
    backends = sys.modules.get("triton.backends")
    return backends is not None and "cpu" in backends.backends


def install() -> None:
    """Switch the interpreter on for this process; a second call does nothing.

    Must run before anything imports Triton: a kernel becomes interpreted or compiled when it is
    decorated, and Triton decorates its own ``tl.sum`` and others at import.

    Raises:
        InterpreterTooLateError: Triton's kernels are compiled ones, or vLLM has found no Triton.
    """
    if installed():
        return
    _refuse_if_late()
    os.environ["TRITON_INTERPRET"] = "1"
    from vllm_graft.testing.interpreter import triton_backend

    triton_backend.add()
    from vllm_graft.testing.interpreter import launch, numerics, syntax, types

    for mended in (syntax, numerics, launch, types):
        mended.mend()


def _refuse_if_late() -> None:
    standard = sys.modules.get("triton.language.standard")
    if standard is not None and type(standard.sum).__name__ == "JITFunction":
        raise InterpreterTooLateError(
            "triton was imported before vllm_graft.testing.install(), so its kernels are compiled "
            "ones. Call install() first (in conftest.py, at module level), or set "
            "TRITON_INTERPRET=1 in the environment of the process."
        )
    importing = sys.modules.get("vllm.triton_utils.importing")
    if importing is not None and not importing.HAS_TRITON:
        raise InterpreterTooLateError(
            "vllm was imported before vllm_graft.testing.install() and has found no CPU back end "
            "of Triton (HAS_TRITON is False). Call install() before anything imports vllm."
        )
