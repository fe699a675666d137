"""Turns of sessions with a host KV cache, below vLLM's real scheduler, on a made-up GPU.

    python -m benchmarks.turns --arms none native ours 'ours:{"load": "async"}' --sessions 64

It needs no GPU. vLLM's scheduler and the scheduler's side of a connector run as in an engine with
asynchronous scheduling; steps and copies take the times of an H200 with an 8B model. So the order
of things is real, and seconds are an estimate, without what copies cost the step's own kernels.
With the default sizes native had 37.2 turns per second on an H200, and 36.4 here. `cpu_ms` is this
machine's time for vLLM's scheduler with its connector, per step.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_graft.bench.hicache.cache_parts import Parts, Sizes, add_sizes, read_sizes
from vllm_graft.bench.hicache.prompt_driver import Answer
from vllm_graft.hicache import cache_refusals
from vllm_graft.hicache.messages.step_metadata import HiCacheReport

LAYERS, HEADS, WIDTH, BLOCK = 32, 8, 128, 16
PAGE = LAYERS * 2 * BLOCK * HEADS * WIDTH * 2
"""Bytes of a block of an 8B model in 16 bits."""

LINK = 50e9
"""Bytes per second between host and device, in each direction."""


class Rank:
    """The copies of a rank, whose two directions are used in order.

    Times are seconds: ``now`` is the engine's thread, ``device`` the end of what it has to do. The
    thread takes ``run`` seconds for each run of bytes that a copy engine is given. ``before`` a
    step says the thread's time, when the device may begin, and when the step's loads have ended;
    ``after`` it the thread's time again; ``report`` tells the scheduler's side of both.
    """

    def __init__(self, run: float) -> None:
        self.counted, self._run = Counter[str](), run
        self._free = {True: 0.0, False: 0.0}
        self.ends: dict[int, tuple[float, str | None]] = {}
        self.later: dict[int, Any] = {}

    def copy(
        self, job: int, pages: int, now: float, device: float, load: bool, name: str | None = None
    ) -> float:
        """Copy behind the device's work, for a request that waits; the thread's time."""
        now += pages * LAYERS * self._run
        self._free[load] = max(now, device, self._free[load]) + pages * PAGE / LINK
        self.ends[job] = self._free[load], name
        self.counted["pages loaded" if load else "pages stored"] += pages
        return now

    def wait(self, jobs: Iterable[int], now: float) -> float:
        """The time, from now on, at which all of these jobs have ended."""
        return max([now, *(self.ends[job][0] for job in jobs if job in self.ends)])


class OwnRank(Rank):
    """Ours. Loads within steps are no runs; they go by a kernel and by 2D copies."""

    def before(self, work: Any, now: float, device: float) -> tuple[float, float, float]:
        now = self._all(work.early_stores, now, device, load=False)
        ready = self.wait(work.fences, device)
        self.counted["loads within steps"] += len(work.sync_loads)
        now += 1e-3 * bool(work.sync_loads)
        for each in work.sync_loads:
            self.copy(each.ids[0], sum(map(len, each.transfers)), now, device, load=True)
        return now, ready, self.wait([each.ids[0] for each in work.sync_loads], 0.0)

    def after(self, work: Any, now: float, device: float) -> float:
        self.counted["loads outside"] += len(work.async_loads)
        now = self._all(work.async_loads, now, device, load=True)
        return self._all(work.stores, now, device, load=False)

    def report(self, work: Any, done: Iterable[int], seconds: float) -> Any:
        found = HiCacheReport(dict.fromkeys(done, 1), steps={work.step: seconds})
        # The link's speed is known in advance.
        found.loads.add(1 << 30, (1 << 30) / LINK)
        return found

    def _all(self, work: Sequence[Any], now: float, device: float, load: bool) -> float:
        for each in work:
            pages = sum(map(len, each.transfers))
            now = self.copy(each.ids[0], pages, now, device, load, *each.request_ids)
        return now


class NativeRank(Rank):
    """vLLM's own: it stores a step later, and waits on the host where a block is given away."""

    def before(self, work: Any, now: float, device: float) -> tuple[float, float, float]:
        if work.jobs_to_flush:
            for job in work.jobs_to_flush & work.store_jobs.keys():
                self.later[job] = work.store_jobs.pop(job)
            now = self.wait(work.jobs_to_flush, self._stored(now, device))
        return now, device, 0.0

    def after(self, work: Any, now: float, device: float) -> float:
        now = self._stored(now, device)
        self.counted["loads outside"] += len(work.load_jobs)
        for job, load in work.load_jobs.items():
            now = self.copy(job, len(load.dst_spec.block_ids), now, device, True, load.req_id)
        self.later |= work.store_jobs
        return now

    def report(self, work: Any, done: Iterable[int], seconds: float) -> Any:
        return OffloadingWorkerMetadata(dict.fromkeys(done, 1))

    def _stored(self, now: float, device: float) -> float:
        while self.later:
            job, store = self.later.popitem()
            now = self.copy(job, len(store.src_spec.block_ids), now, device, load=False)
        return now


ARMS = {
    "none": (Rank, "", ""),
    "native": (NativeRank, "OffloadingConnector", "cpu_bytes_to_use"),
    "ours": (OwnRank, "HiCacheConnector", "host_bytes"),
}


def scheduler_of(arm: str, sizes: Sizes) -> tuple[Any, Any]:
    """vLLM's scheduler with an arm's connector, and its hasher of blocks."""
    load_general_plugins()
    kind, _, text = arm.partition(":")
    _, name, key = ARMS[kind]
    extra = {key: int(sizes.host_gib * 2**30), **json.loads(text or "{}")}
    transfer = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    shapes: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    shapes["max_position_embeddings"] = sizes.gpu_tokens
    blocks = sizes.gpu_tokens // BLOCK + 1
    # The host memory of a made-up machine is never taken.
    memory = mock.patch.object(cache_refusals, "machine_bytes", return_value=1 << 50)
    with tempfile.TemporaryDirectory() as folder, memory:
        (Path(folder) / "config.json").write_text(json.dumps(shapes))
        config = EngineArgs(
            model=folder, skip_tokenizer_init=True, block_size=BLOCK, enable_prefix_caching=True,
            num_gpu_blocks_override=blocks, max_model_len=sizes.gpu_tokens,
            max_num_seqs=sizes.sessions, max_num_batched_tokens=8192,
            **({"kv_transfer_config": transfer} if name else {}),
        ).create_engine_config()  # fmt: skip
    # On a CPU it is switched off.
    config.scheduler_config.async_scheduling = True
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=WIDTH, dtype=torch.bfloat16
    )
    names = [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]
    hashing = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hashing)
    cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(names, spec)])
    grammars = StructuredOutputManager(config)
    scheduler = AsyncScheduler(config, cache, grammars, BLOCK, BLOCK, log_stats=True)
    return scheduler, get_request_block_hasher(BLOCK, hashing)


class World:
    """The loop of vLLM's engine, two steps in flight, on simulated time; a driver of sessions."""

    def __init__(self, scheduler: Any, hasher: Any, rank: Any) -> None:
        self.counted, self.cpu, self.emitted = Counter[str](), 0.0, 0
        self._scheduler, self._hasher, self._rank = scheduler, hasher, rank
        self._now = self._device = 0.0
        self._coming: list[tuple[float, Any]] = []
        self._requests, self._answers = dict[str, Any](), dict[str, Answer]()
        self._steps: deque[tuple[float, Any, Any]] = deque()
        self._random = random.Random(0)

    def nothing(self, connector: bool = False) -> list[Any]:
        """Do nothing, where nobody waits, nothing is cached and no metrics are there."""
        return []

    forget_device = abort_all = get_metrics = nothing

    def now(self) -> float:
        return self._now

    def rest(self) -> None:
        self._now += 1e-3

    def submit(self, prompt: list[int], max_tokens: int, came: float) -> str:
        name = f"turn-{len(self._answers)}"
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        request = Request(name, prompt, params, None, came, block_hasher=self._hasher)
        self._answers[name], self._requests[name] = Answer(prompt, came), request
        # So long an answer and the turn that follows it are on their ways.
        self._coming.append((self._now + 1.4e-3, request))
        return name

    def step(self) -> dict[str, Answer]:
        """Go on until an answer has ended; return those that have."""
        while True:
            for each in [each for each in self._coming if each[0] <= self._now]:
                self._coming.remove(each)
                self._scheduler.add_request(each[1])
            if self._scheduler.has_requests():
                tokens = self._schedule()
                if len(self._steps) < 2 and (tokens or self._scheduler.has_requests()):
                    continue
            elif not self._steps:
                self._now = min(came for came, _ in self._coming)
                continue
            if ended := self._update(*self._steps.popleft()):
                return ended

    def _schedule(self) -> int:
        self.cpu -= time.thread_time()
        output = self._scheduler.schedule()
        self.cpu += time.thread_time()
        work, names = output.kv_connector_metadata, list(output.num_scheduled_tokens)
        requests = [self._requests[name] for name in names]
        tokens, rank = output.total_num_scheduled_tokens, self._rank
        now, ready, loaded = self._now, self._device, 0.0
        if work is not None:
            now, ready, loaded = rank.before(work, now, ready)
        now += 8.6e-3 if tokens > 512 else 3.1e-3
        held = sum(each.num_computed_tokens for each in requests) * PAGE / BLOCK
        seconds = 4.3e-3 + tokens / 39e3 + held / 4e12
        if tokens:
            self._device = max(max(ready, now) + seconds, loaded + seconds / LAYERS)
        self.counted.update(steps=bool(tokens), rows=len(names), tokens=tokens)
        self._now = now if work is None else rank.after(work, now, self._device)
        done = {job: name for job, (end, name) in rank.ends.items() if end <= self._now}
        rank.ends = {job: end for job, end in rank.ends.items() if job not in done}
        result = ModelRunnerOutput(names, {name: place for place, name in enumerate(names)})
        result.sampled_token_ids = [
            [] if each.is_prefill_chunk else [self._random.randrange(16, 8000)] for each in requests
        ]
        if work is not None:
            told = KVConnectorOutput(finished_recving={*done.values()} - {None})
            told.kv_connector_worker_meta = rank.report(work, done, seconds)
            result.kv_connector_output = told
        self._steps.append((self._device, output, result))
        return int(tokens)

    def _update(self, end: float, output: Any, result: Any) -> dict[str, Answer]:
        self._now, ended = max(self._now, end), {}
        self.cpu -= time.thread_time()
        outputs = self._scheduler.update_from_output(output, result)
        self.cpu += time.thread_time()
        for each in (each for some in outputs.values() for each in some.outputs):
            answer = self._answers[each.request_id]
            answer.tokens += each.new_token_ids
            self.emitted += len(each.new_token_ids)
            if answer.tokens and not answer.first:
                answer.first, answer.cached = self._now, each.prefill_stats.num_cached_tokens
            answer.reason = str(each.finish_reason)
            if each.finish_reason is not None:
                ended[each.request_id] = answer
        return ended


def main(words: Sequence[str] | None = None) -> None:
    """Print figures of the answers, and counts of what happened, a line for each arm."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--load", choices=["load", "open_load"], default="load")
    told = "microseconds to copy a run of bytes; 4 where several engines use the device"
    parser.add_argument("--run-us", type=float, default=1.0, help=told)
    add_sizes(parser)
    arguments = parser.parse_args(words)
    sizes = read_sizes(arguments)
    for arm in arguments.arms:
        scheduler, hasher = scheduler_of(arm, sizes)
        rank = ARMS[arm.partition(":")[0]][0](1e-6 * arguments.run_us)
        world = World(scheduler, hasher, rank)
        parts = Parts(world, sizes, driver=world)  # type: ignore[arg-type]
        found = parts((arguments.load, 1, sizes.sessions))
        scheduler.shutdown()
        found["cpu_ms"] = 1e3 * world.cpu / world.counted["steps"]
        rounded = {name: round(value, 3) for name, value in found.items()}
        print(json.dumps({"arm": arm, **rounded, **world.counted, **rank.counted}), flush=True)


if __name__ == "__main__":
    main()
