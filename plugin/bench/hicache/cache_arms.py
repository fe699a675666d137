"""The engines that are compared, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import shutil
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm_graft.bench.hicache.model_sizes import Sizes

Row = dict[str, Any]

ENVIRONMENT = {
    # A callable is sent to the worker, to count its steps.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Plan:
    """What a process needs to build its engine.

    Attributes:
        name: `none`, `native`, `ours` or `race`; after a colon, JSON that goes into the connector's
            extra configuration.
        model: checkpoint folder.
        device: `cuda` or `cpu`.
        module: the module of our connector, where it is not registered by name.
        connector: name of our connector's class.
        compiled: whether the model is compiled, as vLLM does unless told otherwise.
        load_format: option of `vllm.LLM`; `dummy` where the checkpoint has none of these
        shapes.
    """

    name: str
    model: Path
    device: str
    sizes: Sizes
    connector: str = "HiCacheConnector"
    module: str | None = None
    compiled: bool = True
    load_format: str = "auto"

    @property
    def kind(self) -> str:
        """The part of the name before the colon."""
        return self.name.partition(":")[0]

    @property
    def label(self) -> str:
        """The name in letters and digits."""
        return re.sub(r"\W+", "-", self.name).strip("-")

    @property
    def extra(self) -> dict[str, Any]:
        """The part of the name after the colon."""
        return dict(json.loads(self.name.partition(":")[2] or "{}"))


def transfer_config(plan: Plan) -> Row:
    """Return the options of `vllm.LLM` by which arms differ.

    Raises:
        ValueError: the arm's name cannot be read.
    """
    sizes = plan.sizes
    if plan.kind == "none":
        return {}
    if plan.kind == "native":
        stand_in = _stand_in(plan)
        if not stand_in and not plan.extra:
            return {"kv_offloading_size": sizes.host_gib}
        size = {"cpu_bytes_to_use": int(sizes.host_gib * 2**30)}
        extra = {**size, **stand_in, **plan.extra}
        return {"kv_transfer_config": _connector("OffloadingConnector", extra)}
    if plan.kind in ("ours", "race"):
        extra = {"host_bytes": int(sizes.host_gib * 2**30), **plan.extra}
        config = _connector(plan.connector, extra)
        if plan.module:
            config["kv_connector_module_path"] = plan.module
        return {"kv_transfer_config": config}
    raise ValueError(f"--arms {plan.name!r}: say none, native or ours, or with :JSON after it")


def _stand_in(plan: Plan) -> Row:
    """Return options that let vLLM's connector run where it can't as it is; empty where it can."""
    if plan.device == "cpu":
        name = "CpuCopySpec"
    elif shutil.disk_usage("/dev/shm").free < plan.sizes.host_gib * 2**30:
        name = "PrivateMemorySpec"
        print(f"{plan.name}: /dev/shm is too small, its host memory is private", flush=True)
    else:
        return {}
    return {"spec_name": name, "spec_module_path": "vllm_graft.bench.hicache.native_arm"}


def _connector(name: str, extra: Row) -> Row:
    return {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
        "kv_load_failure_policy": "recompute",
    }


def engine_options(plan: Plan) -> Row:
    """Return options of `vllm.LLM`, which are the same for all arms but for the connector."""
    sizes = plan.sizes
    options: Row = {
        "block_size": sizes.block,
        "disable_log_stats": False,
        "enable_prefix_caching": True,
        "max_model_len": sizes.max_model_len,
        "max_num_batched_tokens": sizes.max_batched_tokens,
        "max_num_seqs": sizes.max_num_seqs,
        "num_gpu_blocks_override": sizes.gpu_blocks,
        "seed": 0,
        **transfer_config(plan),
    }
    if plan.device == "cpu":
        return options
    compilation: Row = {"cudagraph_capture_sizes": list(sizes.capture)}
    if plan.kind == "race":
        compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        # Batches come together differently each time, and in 16 bits that alone changes tokens.
        options |= {"dtype": "float32", "attention_config": {"backend": "TRITON_ATTN"}}
    elif not plan.compiled:
        compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return options | {
        "compilation_config": compilation,
        # Several engines start at the same time, so none may take all the memory that it finds.
        # This share has to be free when one starts, whatever the others have taken by then.
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": _kv_bytes(plan.model, sizes, 4 if plan.kind == "race" else 2),
        "load_format": plan.load_format,
        # Texts are random: only times and equality count. The rotary table has to be long enough.
        "hf_overrides": {"max_position_embeddings": sizes.max_model_len},
    }


def _kv_bytes(model: Path, sizes: Sizes, element: int) -> int:
    """Return the bytes of K and V for all blocks, ``element`` bytes per number, plus a tenth."""
    config = json.loads((model / "config.json").read_text())
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    size = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    token = 2 * element * config["num_hidden_layers"] * heads * size
    return int(1.1 * token * sizes.gpu_blocks * sizes.block)


@contextlib.contextmanager
def engine(plan: Plan) -> Iterator[Any]:
    """Build the engine of a plan: on the GPU, or in this process on the CPU."""
    if plan.device == "cpu":
        from vllm_graft.testing import cpu_engine

        with cpu_engine(plan.model, **engine_options(plan)) as llm:
            yield llm
        return
    from vllm import LLM

    llm = LLM(str(plan.model), **engine_options(plan))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def serve(pipe: Connection, plan: Plan) -> None:
    """Run an arm's process: import vLLM, wait for the word, build the engine, answer each call.

    A call is (name, arguments), its answer a row. A call that raises is answered with a row that
    has `error`; the engine stays.
    """
    os.environ.update({k: v for k, v in ENVIRONMENT.items() if k not in os.environ})
    os.environ.setdefault("VLLM_CACHE_ROOT", f"/tmp/graft-bench-cache/{plan.label}")
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    from vllm_graft.bench.hicache.engine_parts import Parts
    from vllm_graft.bench.hicache.race import Race

    imported = time.perf_counter()
    try:
        if plan.device != "cpu":
            # The import takes long, and can be done while copies are measured.
            from vllm import LLM  # noqa: F401
        imported = time.perf_counter() - imported
        if pipe.recv() is None:
            return
        started = time.perf_counter()
        with engine(plan) as llm:
            parts = Race(llm, plan) if plan.kind == "race" else Parts(llm, plan.sizes)
            pipe.send({"ready": time.perf_counter() - started, "imported": imported})
            while (call := pipe.recv()) is not None:
                name, arguments = call
                try:
                    pipe.send(getattr(parts, name)(*arguments))
                except Exception as error:
                    traceback.print_exc()
                    pipe.send({"error": f"{type(error).__name__}: {error}"})
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            pipe.send({"error": f"{type(error).__name__}: {error}"})


class Arm:
    """The process of one engine, seen from outside. A call never waits longer than its limit."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.failed: str | None = None
        self.started = False
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, plan))
        self._process.start()
        theirs.close()

    @property
    def name(self) -> str:
        """The arm's name on the command line."""
        return self.plan.name

    def begin(self) -> None:
        """Let the process build its engine; the first :meth:`wait` tells how long that took."""
        self._send("begin")

    def ask(self, name: str, *arguments: Any) -> None:
        """Begin a part; :meth:`wait` returns its row."""
        self._send((name, arguments))

    def call(self, name: str, *arguments: Any, limit: float = 120) -> Row:
        """Run a part; return its row, or a row with `error`."""
        self.ask(name, *arguments)
        return self.wait(limit)

    def wait(self, limit: float) -> Row:
        """Return the process's next row; kill the process if none comes within `limit` seconds."""
        if self.failed is None:
            try:
                if self._pipe.poll(limit):
                    row: Row = self._pipe.recv()
                    return row
                self.failed = f"no answer within {limit:.0f} s: killed"
                self._kill()
            except (EOFError, OSError) as error:
                self.failed = f"its process ended ({type(error).__name__}); its log is above"
        return {"error": self.failed}

    def stop(self) -> None:
        """Ask the engine to shut down."""
        if self.failed is None:
            self._send(None)

    def close(self, limit: float = 10) -> None:
        """Wait `limit` seconds at most for the shutdown, then end the process."""
        if self.failed is None:
            self._process.join(limit)
        self._kill()
        self._process.join(10)

    def _send(self, message: Any) -> None:
        if self.failed is None:
            try:
                self._pipe.send(message)
            except OSError as error:
                self.failed = f"its process ended: {error}"

    def _kill(self) -> None:
        """End the process, and the engine's processes that it may have left."""
        import psutil  # type: ignore[import-untyped]

        if self._process.pid is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            for child in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
