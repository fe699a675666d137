"""Finished requests of a scheduler go to a thread, which writes them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from vllm_graft.base.log import warning_once
from vllm_graft.base.metric import Numbers
from vllm_graft.base.values import reason_of
from vllm_graft.learn.learn_config import LearnConfig
from vllm_graft.learn.learn_metrics import LEFT_OUT
from vllm_graft.learn.records import Records
from vllm_graft.seams.wrap import around

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

WAITING_TOKENS = 2**20
"""Tokens that wait for the thread at most. Raised, bursts are recorded whole, and take 8 bytes of
host memory more for each."""


class Recorder:
    """Takes finished requests, and writes those that a head may learn from.

    Args:
        config: the section; its folder is made, with rights for its owner alone.
    """

    def __init__(self, config: LearnConfig) -> None:
        assert config.record is not None
        folder = Path(config.record).absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._salted = config.record_salted
        self._records = Records(folder, int(config.record_bytes))
        self._rows = SimpleQueue[tuple[Sequence[int], Sequence[int]]]()
        self._waiting, self._lock = 0, threading.Lock()
        self._requests = self._tokens = 0
        self._left_out = dict.fromkeys(LEFT_OUT, 0)
        threading.Thread(target=self._write, name="graft-records", daemon=True).start()

    def take(self, request: Request) -> None:
        """Take in a finished request, whose tokens nobody changes from now on; it takes no time
        that depends on their number."""
        prompt, answer = request.prompt_token_ids, request.output_token_ids
        if reason := self._why_not(request, len(prompt or ()) + len(answer)):
            self._left_out[reason] += 1
            return
        assert prompt is not None
        with self._lock:
            self._waiting += len(prompt) + len(answer)
        self._rows.put((prompt, answer))

    def numbers(self) -> Numbers:
        """What was counted since the start, by the names of the part's metrics."""
        return {
            "recorded_requests": self._requests,
            "recorded_tokens": self._tokens,
            "left_out_requests": dict(self._left_out),
        }

    def _why_not(self, request: Request, tokens: int) -> str:
        """The reason not to record a request, one of `LEFT_OUT`; empty if there is none."""
        if request.cache_salt and not self._salted:
            return "salted"
        if request.lora_request is not None:
            return "adapter"
        if request.prompt_token_ids is None or request.mm_features or request.resumable:
            return "not_text"
        if tokens > self._records.longest:
            return "long"
        return "behind" if self._waiting + tokens > WAITING_TOKENS else ""

    def _write(self) -> None:
        while True:
            prompt, answer = self._rows.get()
            tokens = len(prompt) + len(answer)
            try:
                self._records.write(prompt, answer)
            except Exception as error:
                self._left_out["failed"] += 1
                warning_once(f"graft.learn.record: a request is not recorded: {reason_of(error)}")
            else:
                self._requests += 1
                self._tokens += tokens
            with self._lock:
                self._waiting -= tokens


def record(scheduler: Scheduler, config: LearnConfig) -> Recorder:
    """Let `scheduler` hand over each request that it finishes by itself; aborted ones are not."""
    recorder = Recorder(config)

    # Only this scheduler is changed: others in the process may have other configurations.
    @around(scheduler, "update_from_output")
    def then_take(stock: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        known = scheduler.requests
        ran = [known.get(name) for name in scheduler_output.num_scheduled_tokens]
        found = stock(scheduler_output, model_runner_output)
        for request in ran:
            if request is not None and request.is_finished():
                recorder.take(request)
        return found

    return recorder
