"""The parts of an engine's start, and how long they took."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm_graft.base.log import logger

PARTS = ("rehearsal", "wait", "compile", "attention", "draft_graphs", "costs")
"""Listing kernels; waiting for those that are compiled ahead; compiling and loading kernels in this
process, vLLM's among them; comparing kernels of attention; capturing the draft's graphs; timing
steps. The last three leave out what was compiled meanwhile."""

KERNELS = ("ahead", "failed_ahead", "compiled", "loaded")
"""Kernels that were compiled ahead, that could not be, that were compiled where they were first
launched, and that were found in Triton's cache there."""

_OURS = "vllm_graft."


@dataclass
class StartClock:
    """Seconds by part, and our kernels that this process compiled or found in Triton's cache."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    compiled: int = 0
    loaded: int = 0

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what happens inside towards a part, without what is compiled meanwhile."""
        began, compiled = time.perf_counter(), self.seconds["compile"]
        try:
            yield
        finally:
            took = time.perf_counter() - began
            self.seconds[name] += max(0.0, took - (self.seconds["compile"] - compiled))

    def listen(self) -> None:
        """Count what Triton compiles in this process from now on. Triton tells one listener; one
        that is there already is told as before."""
        from triton import knobs

        before = knobs.compilation.listener

        def told(**kwargs: Any) -> Any:
            self.count(**kwargs)
            return None if before is None else before(**kwargs)

        knobs.compilation.listener = told

    def count(self, *, src: Any, times: Any, cache_hit: bool, **others: Any) -> None:
        """Count a kernel; the arguments are those of Triton's listener."""
        self.seconds["compile"] += times.total / 1e6
        if not str(getattr(getattr(src, "fn", None), "module", "")).startswith(_OURS):
            return
        if cache_hit:
            self.loaded += 1
        else:
            self.compiled += 1

    def log(self) -> None:
        told = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        logger.info(
            f"vllm-graft's part of the start, in seconds: {told} ({self.compiled} of its kernels "
            f"were compiled in this process, {self.loaded} found in Triton's cache)"
        )
