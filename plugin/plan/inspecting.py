"""Where the classes of models are inspected, which vLLM does in a child process per class."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock


@contextlib.contextmanager
def inspecting(*, apart: bool) -> Iterator[None]:
    """Let vLLM inspect classes quickly: a child process per class takes many seconds.

    Args:
        apart: whether one child process inspects all of them. It sees this machine's device where
            this process pretends to have another, for which the classes may not be importable.
            Otherwise this process does it, which then may no longer fork.
    """
    from vllm.model_executor.models import registry

    if not apart:
        with mock.patch.object(registry, "_run_in_subprocess", _here):
            yield
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:

        def run(function: Callable[[], Any]) -> Any:
            import cloudpickle

            return pool.submit(_unpickled, cloudpickle.dumps(function)).result()

        def inspect_model_cls(lazy: Any) -> Any:
            return pool.submit(_inspected, lazy).result()

        with (
            mock.patch.object(registry, "_run_in_subprocess", run),
            # It also imports the loader, to keep what it found; this process may not be able to.
            mock.patch.object(
                registry._LazyRegisteredModel, "inspect_model_cls", inspect_model_cls
            ),
        ):
            yield


def _here(function: Callable[[], Any]) -> Any:
    return function()


def _unpickled(function: bytes) -> Any:
    import cloudpickle

    return cloudpickle.loads(function)()


def _inspected(lazy: Any) -> Any:
    from vllm.model_executor.models import registry

    with mock.patch.object(registry, "_run_in_subprocess", _here):
        return lazy.inspect_model_cls()
