"""A closed loop whose engine is watched while it is timed."""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.bars import step_pace
from benchmarks.node_counts import Nodes, nodes_used, watch_nodes
from vllm_graft.bench.common.closed_loop import Ask, Case, ClosedLoop, Measured, Request


@dataclass(frozen=True)
class Call:
    """A request to call a function in the workers; its first argument is the worker."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Watched(Measured):
    """What was measured, and more.

    `sent` is a checksum of prompts, parameters and seeds. `held` is the mean number of tokens of
    the requests in flight, with their prompts. `nodes` is what `nodes_used` says.
    """

    sent: int = field(default=0, compare=False)
    held: float = field(default=0.0, compare=False)
    nodes: Nodes = field(default_factory=dict, compare=False)


class WatchedLoop(ClosedLoop):
    """It answers a `Call`, too, and prints the pace of its steps if it `says_paces`."""

    def __init__(self, llm: Any, prompts: Sequence[Any], *, says_paces: bool = False) -> None:
        super().__init__(llm, prompts)
        self._says_paces = says_paces
        self._prompt_tokens: dict[str, int] = {}
        self._held: list[int] = []
        self._checksum = self._batch = 0

    def __call__(self, wish: Case | Ask | Call) -> Any:
        if isinstance(wish, Call):
            return self._llm.collective_rpc(wish.function, args=wish.arguments)[0]
        return super().__call__(wish)

    def measure(self, case: Case) -> Measured:
        self._prompt_tokens.clear()
        self._checksum, self._batch = 0, case.batch
        return super().measure(case)

    def _window(self) -> Watched:
        self._llm.collective_rpc(watch_nodes)
        if self._says_paces:
            self._llm.collective_rpc(step_pace.watch_pace, args=(self._batch,))
        self._held.clear()
        found = super()._window()
        if self._says_paces:
            print(f"  {step_pace.line(self._llm.collective_rpc(step_pace.paces)[0])}", flush=True)
        nodes: Nodes = self._llm.collective_rpc(nodes_used, args=(self._batch,))[0]
        held = statistics.mean(self._held or [0])
        return Watched(found.rate, found.acceptance, found.step, self._checksum, held, nodes)

    def _send(self, request: Request, params: Any) -> None:
        sent = f"{params.temperature} {params.max_tokens} {params.seed} {request.prompt}"
        self._checksum = zlib.crc32(sent.encode(), self._checksum)
        super()._send(request, params)

    def _outputs(self) -> list[Any]:
        outputs = super()._outputs()
        for output in outputs:
            self._prompt_tokens[output.request_id] = len(output.prompt_token_ids)
        return outputs

    def _step(self) -> tuple[int, int]:
        tokens, ended = super()._step()
        if tokens:
            prompts = sum(self._prompt_tokens.get(name, 0) for name in self._emitted)
            self._held.append(prompts + sum(self._emitted.values()))
        return tokens, ended
