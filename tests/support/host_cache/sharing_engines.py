"""Engines in processes of their own that share host memory; spawned processes import this file."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.engines.cache_engines import generate, metrics, transfer

SPAWN = multiprocessing.get_context("spawn")
UP_SECONDS = 240.0


def serve(pipe: Connection, folder: Path, extra: dict[str, Any]) -> None:
    """Answer batches until the pipe ends; the device forgets its cache before each."""
    from vllm_graft.testing import cpu_engine

    with cpu_engine(folder, kv_transfer_config=transfer(load="async", shared=True, **extra)) as llm:
        pipe.send("up")
        while (batch := pipe.recv()) is not None:
            assert llm.reset_prefix_cache(reset_connector=batch == "reset")
            pipe.send(batch if batch == "reset" else (*generate(llm, batch), metrics(llm)))


class SharingEngine:
    """An engine of the model in `folder` that shares host memory."""

    def __init__(self, folder: Path, **extra: Any) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=serve, args=(theirs, folder, extra))
        self.process.start()
        theirs.close()
        assert self.told() == "up"

    def told(self) -> Any:
        assert self._pipe.poll(UP_SECONDS)
        return self._pipe.recv()

    def ask(self, batch: Any) -> Any:
        """Tokens, cached tokens and metrics; or let it reset its connector."""
        self._pipe.send(batch)
        return self.told()

    def stop(self) -> None:
        self._pipe.send(None)
        self.process.join(60)
        assert self.process.exitcode == 0
