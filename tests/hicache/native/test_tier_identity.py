"""Chunks of our tier belong to what an engine runs, and to nobody once that has changed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.base import TransferJob

from tests.support.tier_host import CONTEXT, Host, key, spec
from tests.support.vllm_configs import vllm_config_at
from vllm_graft.hicache.pages import engine_core


class Core:
    """Stand-in for vLLM's engine core, with the configuration of a model at a path."""

    def __init__(self, path: Path, runs: str = "FlashAttentionBackend") -> None:
        self.vllm_config = vllm_config_at(path)
        self.runs = runs

    def collective_rpc(self, method: Any) -> list[dict[str, list[str]]]:
        return [{self.runs: ["layers.0"]}] * 2


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.zeros(4)}, folder / "model.safetensors")
    return folder


def _without_a_change(core: Core) -> None:
    pass


def _rope_by_overrides(core: Core) -> None:
    core.vllm_config.model_config.hf_values["rope_theta"] = 500_000.0


def _quantised_while_loading(core: Core) -> None:
    core.vllm_config.model_config.quantization = "fp8"


def _another_processor(core: Core) -> None:
    (Path(core.vllm_config.model_config.model) / "preprocessor_config.json").write_text("{}")


def _other_attention(core: Core) -> None:
    core.runs = "TorchAttentionBackend"


def _with_adapters(core: Core) -> None:
    core.vllm_config.lora_config = object()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (_without_a_change, LookupResult.HIT),
        (_rope_by_overrides, LookupResult.MISS),
        (_quantised_while_loading, LookupResult.MISS),
        (_another_processor, LookupResult.MISS),
        (_other_attention, LookupResult.MISS),
        (_with_adapters, LookupResult.MISS),
    ],
)
def test_inputs_of_the_engine_make_the_namespace(
    tmp_path: Path,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Core], None],
    found: LookupResult,
) -> None:
    """vLLM's spec tells none of these; see ``test_namespace`` for all of them."""
    core = Core(checkpoint)
    monkeypatch.setattr(engine_core, "_latest", weakref.ref(core))
    host = Host(tmp_path / "store", spec(model=str(checkpoint)), weights=None)
    assert host.job([key(1)], [0], load=False).success
    host.tier.shutdown()
    change(core)
    other = Host(tmp_path / "store", spec(model=str(checkpoint)), weights=None)
    assert other.lookup(key(1)) == [found]
    other.tier.shutdown()


def test_chunks_of_adapters_are_shared_with_nobody(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = Core(checkpoint)
    _with_adapters(core)
    monkeypatch.setattr(engine_core, "_latest", weakref.ref(core))
    for _ in range(2):
        host = Host(tmp_path / "store", spec(model=str(checkpoint)))
        assert host.lookup(key(1)) == [LookupResult.MISS]
        assert host.job([key(1)], [0], load=False).success
        host.tier.shutdown()


def test_after_a_change_no_chunk_of_before_is_found_and_none_of_after_elsewhere(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = Core(checkpoint)
    monkeypatch.setattr(engine_core, "_latest", weakref.ref(core))
    host = Host(tmp_path / "store", spec(model=str(checkpoint)))
    assert host.job([key(1)], [0], load=False).success
    engine_core._tell(core, engine_core.Change.RESET, "reset_prefix_cache")
    assert host.lookup(key(1)) == [LookupResult.MISS]
    assert not host.job([key(1)], [0], load=True).success
    assert host.job([key(1), key(2)], [1, 2], load=False).success
    assert host.lookup(key(1), key(2)) == [LookupResult.HIT] * 2
    engine_core._tell(core, engine_core.Change.WEIGHTS, "reload_weights")
    assert host.lookup(key(1), key(2)) == [LookupResult.MISS] * 2
    host.tier.shutdown()
    # The files' weights are those of the first chunk alone.
    again = Host(tmp_path / "store", spec(model=str(checkpoint)))
    assert again.lookup(key(1), key(2)) == [LookupResult.HIT, LookupResult.MISS]
    again.tier.shutdown()


def test_a_store_that_waits_keeps_the_name_of_its_time(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = Core(checkpoint)
    monkeypatch.setattr(engine_core, "_latest", weakref.ref(core))
    host = Host(tmp_path / "store", spec(model=str(checkpoint)), n_write_threads=1)
    busy = threading.Event()
    host.tier._writers.submit(busy.wait)
    host.tier.submit_store(TransferJob(1, [key(1)], np.arange(1), False, CONTEXT))
    host.tier.changed(engine_core.Change.RESET)
    busy.set()
    host.tier.drain_jobs()
    assert host.lookup(key(1)) == [LookupResult.MISS]
    host.tier.shutdown()
