"""What the host launches in each step of an engine of this process, outside of its graphs."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import cuda_graphs


@dataclass
class StepWork:
    """One step: rows that each request verifies, and the names of what was launched.

    `launches` are kernels of Triton and replays of graphs; `operators` are torch's within the
    drafter's `propose`, without those that only view or allocate.
    """

    rows: list[int]
    launches: Counter[str] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)


class _Operators(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        before, after = (cuda_graphs.tensors_of(each) for each in ((args, kwargs), results))
        known = {tensor.untyped_storage().data_ptr() for tensor in before}
        is_view = all(tensor.untyped_storage().data_ptr() in known for tensor in after)
        if func._schema.is_mutable or not (is_view or "empty" in func._schema.name):
            self._found[func._schema.name] += 1
        return results


@contextlib.contextmanager
def counting(runner: Any) -> Iterator[list[StepWork]]:
    """Count the work of a model runner's steps while its kernels are interpreted."""
    from triton.runtime.interpreter import InterpretedFunction

    steps: list[StepWork] = []
    execute, propose = runner.execute_model, runner.speculator.propose
    run, replay = InterpretedFunction.run, cuda_graphs.CUDAGraph.replay
    replaying = False

    def begun(output: Any, *args: Any, **kwargs: Any) -> Any:
        steps.append(StepWork(sorted(output.num_scheduled_tokens.values())))
        return execute(output, *args, **kwargs)

    def proposed(*args: Any, **kwargs: Any) -> Any:
        with _Operators(steps[-1].operators):
            return propose(*args, **kwargs)

    def launched(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if steps and not replaying:
            steps[-1].launches[kernel.fn.__name__] += 1
        return run(kernel, *args, **kwargs)

    def replayed(graph: Any) -> None:
        nonlocal replaying
        steps[-1].launches["replay"] += 1
        replaying = True
        try:
            replay(graph)
        finally:
            replaying = False

    with contextlib.ExitStack() as patches:
        for owner, name, value in (
            (runner, "execute_model", begun),
            (runner.speculator, "propose", proposed),
            (InterpretedFunction, "run", launched),
            (cuda_graphs.CUDAGraph, "replay", replayed),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        yield steps
