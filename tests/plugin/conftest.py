"""Fakes and a way to run a snippet beside vLLM in a fresh process."""

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_graft.hooks import manager
from vllm_graft.seams import post_import
from vllm_graft.seams.wrap import BuiltClasses

RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def run_python() -> RunPython:
    """Run a snippet in a new interpreter; keyword arguments are environment variables."""

    def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        inherited = {key: value for key, value in os.environ.items() if key != "VLLM_PLUGINS"}
        return subprocess.run(
            [sys.executable, "-P", "-c", code],
            env={**inherited, "OMP_NUM_THREADS": "1", **variables},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    return run


@pytest.fixture
def vllm_config() -> Any:
    """A light stand-in for a VllmConfig that every part can serve."""
    return make_vllm_config()


def make_vllm_config() -> Any:
    off = "is_hybrid is_attention_free use_mla is_encoder_decoder uses_alibi return_sampling_mask"
    target = SimpleNamespace(
        **dict.fromkeys((*off.split(), "enable_trace_replay"), False),
        logits_processors=None,
        runner_type="generate",
        max_model_len=1024,
        hf_text_config=SimpleNamespace(),
        get_vocab_size=lambda: 1000,
        tokenizer="target",
        tokenizer_revision=None,
    )
    scheduler = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
    ranks = ("data", "pipeline", "decode_context", "prefill_context")
    unasked = "use_local_argmax_reduction parallel_drafting enable_adaptive_verification"
    return SimpleNamespace(
        additional_config={"graft": {"tree": {}}},
        model_config=target,
        use_v2_model_runner=True,
        watermark_config=None,
        kv_transfer_config=None,
        attention_config=SimpleNamespace(backend=None, flash_attn_version=None),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(name="FULL_AND_PIECEWISE"),
            cudagraph_capture_sizes=None,
            max_cudagraph_capture_size=None,
        ),
        scheduler_config=SimpleNamespace(
            **scheduler,
            enable_chunked_prefill=True,
            max_num_scheduled_tokens=None,
            long_prefill_token_threshold=0,
        ),
        parallel_config=SimpleNamespace(
            **{f"{name}_parallel_size": 1 for name in ranks},
            use_ubatching=False,
            enable_batch_sharded_sampling=None,
            worker_extension_cls="",
        ),
        speculative_config=SimpleNamespace(
            method="eagle3",
            num_speculative_tokens=31,
            num_speculative_tokens_per_batch_size=None,
            max_num_new_slots_for_drafting=0,
            target_model_config=target,
            draft_model_config=SimpleNamespace(
                hf_config=SimpleNamespace(), use_mla=False, model="draft", revision=None
            ),
            draft_sample_method="greedy",
            rejection_sample_method="standard",
            **dict.fromkeys(unasked.split(), False),
        ),
    )


class FakeEntryPoint:
    """An installed distribution's entry point, without a distribution."""

    def __init__(self, dist: str, plugin: Any, name: str = "main") -> None:
        self.name = name
        self.dist = SimpleNamespace(name=dist, version="1.0")
        self._plugin = plugin

    def load(self) -> Any:
        if isinstance(self._plugin, BaseException):
            raise self._plugin
        return self._plugin


@pytest.fixture
def entry_point() -> Callable[..., importlib.metadata.EntryPoint]:
    return FakeEntryPoint  # type: ignore[return-value]


@pytest.fixture
def fake_module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Put a module with the given attributes into sys.modules, its parents included."""

    def make(name: str, **attributes: Any) -> ModuleType:
        parts = name.split(".")
        for end in range(1, len(parts)):
            parent = ".".join(parts[:end])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


@pytest.fixture
def on(fake_module: Callable[..., ModuleType]) -> Callable[..., None]:
    def choose(platform: Any, batch_invariant: bool = False) -> None:
        envs = fake_module("vllm.envs", VLLM_BATCH_INVARIANT=batch_invariant)
        fake_module("vllm", envs=envs, __version__="0.33.0")
        fake_module("vllm.platforms", current_platform=platform)

    return choose


@pytest.fixture
def unhooked_part(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType, Any], manager.Manager]:
    """Stand a part in a process where nothing is hooked, without third parties; return those."""

    def prepare(module: ModuleType, part: Any) -> manager.Manager:
        monkeypatch.setattr(module, "require_seams", lambda *parts: None)
        monkeypatch.setattr(part, "built", BuiltClasses("drafts"))
        monkeypatch.setattr(post_import, "_finder", post_import._Finder())
        monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
        plugins = manager.Manager()
        monkeypatch.setattr(manager, "manager", lambda: plugins)
        return plugins

    return prepare
