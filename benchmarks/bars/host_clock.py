"""The host's time in each part of an engine's steps."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from benchmarks.bars.step_pace import BARE, FULL, kind_of

PARTS = ("schedule", "execute", "sample", "propose", "update")
WARM_UP = 8
"""How many first steps of each batch are not counted."""


class Watch:
    """Sum up the host's time in the parts of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._current: dict[str, float] = {}
        self._batch = 0

    @contextmanager
    def watching(self, core: Any, batch: int) -> Iterator[list[dict[str, float]]]:
        """Time the steps of an engine core; the list gets the steps of `batch` decodes."""
        self.steps, self._current, self._batch = [], {}, batch
        runner, scheduler = core.model_executor.driver_worker.model_runner, core.scheduler
        methods = [
            (scheduler, "schedule", "schedule"),
            (runner, "execute_model", "execute"),
            (runner, "sample_tokens", "sample"),
            (runner.speculator, "propose", "propose"),
            (scheduler, "update_from_output", "update"),
        ]
        patches = [
            mock.patch.object(owner, name, self._timed(getattr(owner, name), part))
            for owner, name, part in methods
            if owner is not None
        ]
        for patch in patches:
            patch.start()
        try:
            yield self.steps
        finally:
            for patch in patches:
                patch.stop()

    def _timed(self, method: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                # In an asynchronous engine the steps overlap: each part's time counts where it
                # is spent, and a step ends with its launches.
                spent = time.perf_counter() - began
                self._current[part] = self._current.get(part, 0.0) + spent
                if part == "execute":
                    self._keep(args[0])
                elif part == "sample":
                    self._end()

        return timed

    def _keep(self, output: Any) -> None:
        """Note whether the step under way is a decode of the whole batch."""
        self._current["kept"] = float(kind_of(output, self._batch) in (FULL, BARE))

    def _end(self) -> None:
        step, self._current = self._current, {}
        if step.pop("kept", 0.0):
            self.steps.append({part: step.get(part, 0.0) for part in PARTS})
