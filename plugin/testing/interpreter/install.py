"""Triton's interpreter as the CPU back end of vLLM.

vLLM's Model Runner V2 runs on a CPU when ``vllm.triton_utils.HAS_TRITON`` is true, which asks for
an entry ``cpu`` in ``triton.backends.backends``. The Triton of PyPI has none. :func:`install` adds
one that compiles nothing (``interpreter_backend``), switches the interpreter on, and mends the
interpreter's known defects (``interpreter_numerics``, ``interpreter_syntax``)
and its costs (``interpreter_launch``, ``interpreter_types``, ``operators``, ``literals``,
``reductions``, ``loads``).
"""

from __future__ import annotations

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
        InterpreterTooLateError: Triton's kernels are compiled ones already, or vLLM has already
            decided that there is no Triton.
    """
    if installed():
        return
    _refuse_if_late()
    os.environ["TRITON_INTERPRET"] = "1"
    from vllm_graft.testing.interpreter import triton_backend as interpreter_backend

    interpreter_backend.add()
    from vllm_graft.testing.interpreter import launch as interpreter_launch
    from vllm_graft.testing.interpreter import numerics as interpreter_numerics
    from vllm_graft.testing.interpreter import reductions as interpreter_reductions
    from vllm_graft.testing.interpreter import syntax as interpreter_syntax
    from vllm_graft.testing.interpreter import types as interpreter_types

    interpreter_syntax.mend()
    interpreter_numerics.mend()
    interpreter_launch.mend()
    interpreter_reductions.mend()
    interpreter_types.mend()


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
