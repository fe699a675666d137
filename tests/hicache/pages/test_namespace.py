"""Any change that gives a page another meaning gives it another namespace."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_graft.base.errors import ConfigError
from vllm_graft.hicache.pages import weights as weights_module
from vllm_graft.hicache.pages.namespace import NAMESPACE_START, namespace, namespace_start
from vllm_graft.hicache.pages.weights import checkpoint_fingerprint


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{n}": torch.randn(40, 64, generator=generator) for n in range(20)}


def keep_time(path: Path) -> None:
    """Keep the time of modification at one value, as a tool that preserves times would."""
    os.utime(path, ns=(0, 0))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for part in range(2):
        file = tmp_path / f"model-{part}.safetensors"
        save_file({f"{part}.{name}": one for name, one in tensors(part).items()}, file)
        keep_time(file)
    (tmp_path / "config.json").write_text('{"rope_theta": 10000}')
    return tmp_path


def change_a_tensor(path: Path) -> None:
    content = {f"0.{name}": one for name, one in tensors(0).items()}
    content["0.layer.7"] += 0.01
    save_file(content, path / "model-0.safetensors")


def rename_a_tensor(path: Path) -> None:
    content = {f"0.{name}": one for name, one in tensors(0).items()}
    content["0.layer.x"] = content.pop("0.layer.7")
    save_file(content, path / "model-0.safetensors")


def change_a_type(path: Path) -> None:
    content = {f"0.{name}": one.half() for name, one in tensors(0).items()}
    save_file(content, path / "model-0.safetensors")


def drop_a_file(path: Path) -> None:
    (path / "model-1.safetensors").unlink()


def change_the_configuration(path: Path) -> None:
    (path / "config.json").write_text('{"rope_theta": 20000}')


@pytest.mark.parametrize(
    "change",
    [change_a_tensor, rename_a_tensor, change_a_type, drop_a_file, change_the_configuration],
)
def test_other_weights_at_the_same_path(checkpoint: Path, change: Callable[[Path], None]) -> None:
    before = checkpoint_fingerprint(checkpoint)
    assert checkpoint_fingerprint(checkpoint) == before
    change(checkpoint)
    for file in checkpoint.glob("*.safetensors"):
        keep_time(file)
    assert checkpoint_fingerprint(checkpoint) != before


def test_one_byte_that_is_not_sampled_shows_in_the_time(checkpoint: Path) -> None:
    before = checkpoint_fingerprint(checkpoint)
    file = checkpoint / "model-0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert checkpoint_fingerprint(checkpoint) != before


@pytest.mark.parametrize("suffix", [".gguf", ".bin", ".pt", ".safetensors"])
def test_files_without_a_header_are_sampled(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"model{suffix}"
    content = bytearray(random.Random(1).randbytes(3_000_000))
    seen = set()
    for position in (None, 0, 11_800, 2_990_000):
        if position is not None:
            content[position : position + 6000] = bytes(min(6000, len(content) - position))
        file.write_bytes(content)
        keep_time(file)
        # Take it as a directory and as a file (gguf is given as a file).
        seen.add(checkpoint_fingerprint(tmp_path))
        assert checkpoint_fingerprint(file) == checkpoint_fingerprint(file)
    assert len(seen) == 4


def test_blobs_of_the_hub_are_named_after_their_content(tmp_path: Path) -> None:
    """Times and bytes do not matter; another blob is another model."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir()
    snapshot.mkdir()
    for name in ("a" * 64, "b" * 64):
        save_file(tensors(), blobs / name)
    link = snapshot / "model.safetensors"
    link.symlink_to(blobs / ("a" * 64))
    first = checkpoint_fingerprint(snapshot)
    os.utime(blobs / ("a" * 64), ns=(5, 5))
    assert checkpoint_fingerprint(snapshot) == first
    link.unlink()
    link.symlink_to(blobs / ("b" * 64))
    assert checkpoint_fingerprint(snapshot) != first


def test_a_large_checkpoint_is_read_in_few_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads are bounded, whatever the size: here 64 GiB in a sparse file."""
    for part in range(8):
        with (tmp_path / f"model-{part}.gguf").open("wb") as stream:
            stream.truncate(8 << 30)
    read = []
    original = os.pread

    def pread(fd: int, length: int, offset: int) -> bytes:
        read.append(length)
        return original(fd, length, offset)

    monkeypatch.setattr(os, "pread", pread)
    checkpoint_fingerprint(tmp_path)
    assert len(read) <= weights_module.SAMPLES
    assert sum(read) <= weights_module.SAMPLES * weights_module.SAMPLE_BYTES


def test_many_tensors_are_thinned_and_headers_kept(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "SAMPLES", 10)
    before = checkpoint_fingerprint(checkpoint)
    rename_a_tensor(checkpoint)
    keep_time(checkpoint / "model-0.safetensors")
    assert checkpoint_fingerprint(checkpoint) != before


def test_no_weights_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no weights"):
        checkpoint_fingerprint(tmp_path)


@dataclass(frozen=True)
class Spec:
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    page_size_bytes: int = 4096


def engine(path: Path) -> tuple[Any, Any]:
    """Make stand-ins for a VllmConfig and a KVCacheConfig, with the fields that are read."""
    hf_config = {"hidden_size": 64, "rope_scaling": None, "_name_or_path": str(path)}
    model = SimpleNamespace(
        model=str(path),
        revision=None,
        hf_config=SimpleNamespace(to_dict=lambda: dict(hf_config)),
        hf_values=hf_config,
        dtype=torch.bfloat16,
        quantization=None,
        max_model_len=4096,
        seed=0,
    )
    vllm_config = SimpleNamespace(
        model_config=model,
        speculative_config=None,
        weight_transfer_config=None,
        load_config=SimpleNamespace(load_format="auto", model_loader_extra_config={}),
        cache_config=SimpleNamespace(
            cache_dtype="auto", prefix_caching_hash_algo="sha256", block_size=16
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            enable_expert_parallel=False,
            data_parallel_index=0,
        ),
    )
    group = SimpleNamespace(kv_cache_spec=Spec(), layer_names=["layer.0", "layer.1"])
    kv = SimpleNamespace(hash_block_size=16, kv_cache_layout="LBHNC", kv_cache_groups=[group])
    return vllm_config, kv


def test_the_same_engine_has_the_same_namespace(checkpoint: Path) -> None:
    first, again = namespace(*engine(checkpoint)), namespace(*engine(checkpoint))
    assert first == again
    assert len(first) == 16


def set_value(*path: str, value: object) -> Callable[[Any, Any], None]:
    def change(vllm_config: Any, kv: Any) -> None:
        target = {"kv": kv}.get(path[0], vllm_config)
        for name in path[1 if path[0] == "kv" else 0 : -1]:
            target = target[int(name)] if name.isdigit() else getattr(target, name)
        if isinstance(target, dict):
            target[path[-1]] = value
        else:
            setattr(target, path[-1], value)

    return change


CHANGES = {
    "quantization": set_value("model_config", "quantization", value="fp8"),
    "dtype": set_value("model_config", "dtype", value=torch.float16),
    "hf_config": set_value("model_config", "hf_values", "hidden_size", value=65),
    "load_format": set_value("load_config", "load_format", value="safetensors"),
    "loader": set_value("load_config", "model_loader_extra_config", "x", value=1),
    "kv_dtype": set_value("cache_config", "cache_dtype", value="fp8"),
    "hash": set_value("cache_config", "prefix_caching_hash_algo", value="xxhash"),
    "hash_block": set_value("kv", "hash_block_size", value=32),
    "layout": set_value("kv", "kv_cache_layout", value="LBNHC"),
    "block": set_value("kv", "kv_cache_groups", "0", "kv_cache_spec", value=Spec(32)),
    "layers": set_value("kv", "kv_cache_groups", "0", "layer_names", value=["layer.0"]),
    "tp": set_value("parallel_config", "tensor_parallel_size", value=2),
    "pp": set_value("parallel_config", "pipeline_parallel_size", value=2),
    "dcp": set_value("parallel_config", "decode_context_parallel_size", value=2),
    "replica": set_value("parallel_config", "data_parallel_index", value=1),
    "updates": set_value("weight_transfer_config", value=object()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_part_counts(checkpoint: Path, name: str) -> None:
    vllm_config, kv = engine(checkpoint)
    CHANGES[name](vllm_config, kv)
    assert namespace(vllm_config, kv) != namespace(*engine(checkpoint))


KNOWN_LATE = {"hash", "hash_block", "layout", "block", "layers"}


@pytest.mark.parametrize("name", CHANGES)
def test_its_start_is_known_before_the_model_is_loaded(checkpoint: Path, name: str) -> None:
    vllm_config, kv = engine(checkpoint)
    before = namespace_start(vllm_config, asked={"kv_layout": None})
    whole = namespace(vllm_config, kv, asked={"kv_layout": None}, extra={"shards": 1})
    assert whole[:NAMESPACE_START] == before
    CHANGES[name](vllm_config, kv)
    changed = namespace_start(vllm_config, asked={"kv_layout": None})
    assert (changed == before) == (name in KNOWN_LATE)


def test_what_was_asked_of_the_pages_is_in_its_start(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_config, _ = engine(checkpoint)
    found = {namespace_start(vllm_config)}
    found.add(namespace_start(vllm_config, asked={"host_dtype": "fp8"}))
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    found.add(namespace_start(vllm_config))
    # A block size that vLLM has chosen may change later; one that was asked for does not.
    vllm_config.cache_config.block_size = 32
    vllm_config.cache_config.user_specified_block_size = False
    assert namespace_start(vllm_config) in found
    vllm_config.cache_config.user_specified_block_size = True
    found.add(namespace_start(vllm_config))
    vllm_config.attention_config = SimpleNamespace(backend="TRITON_ATTN")
    found.add(namespace_start(vllm_config))
    assert len(found) == 5


def test_where_the_files_lie_does_not_count(checkpoint: Path, tmp_path: Path) -> None:
    before = namespace(*engine(checkpoint))
    moved = checkpoint.rename(tmp_path.with_name(tmp_path.name + "-moved"))
    assert namespace(*engine(moved)) == before


def test_the_draft_counts(checkpoint: Path) -> None:
    vllm_config, kv = engine(checkpoint)
    draft = engine(checkpoint)[0].model_config
    vllm_config.speculative_config = SimpleNamespace(draft_model_config=draft, method="eagle3")
    with_draft = namespace(vllm_config, kv)
    assert with_draft != namespace(*engine(checkpoint))
    draft.hf_values["hidden_size"] = 66
    assert namespace(vllm_config, kv) != with_draft


def test_weights_that_change_in_memory_are_shared_with_nobody(checkpoint: Path) -> None:
    vllm_config, kv = engine(checkpoint)
    vllm_config.weight_transfer_config = object()
    assert namespace(vllm_config, kv) != namespace(vllm_config, kv)


def test_an_explicit_identity_stands_for_the_files(checkpoint: Path) -> None:
    vllm_config, kv = engine(checkpoint)
    first = namespace(vllm_config, kv, weights="v1")
    change_a_tensor(checkpoint)
    assert namespace(vllm_config, kv, weights="v1") == first
    assert namespace(vllm_config, kv, weights="v2") != first
    assert namespace(vllm_config, kv, weights="v1", extra={"host_dtype": "fp8"}) != first


def test_long_rope_depends_on_the_longest_request(checkpoint: Path) -> None:
    vllm_config, kv = engine(checkpoint)
    plain = namespace(vllm_config, kv)
    vllm_config.model_config.max_model_len = 8192
    assert namespace(vllm_config, kv) == plain
    vllm_config.model_config.hf_values["rope_scaling"] = {"rope_type": "longrope"}
    long = namespace(vllm_config, kv)
    vllm_config.model_config.max_model_len = 4096
    assert namespace(vllm_config, kv) != long


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    vllm_config, kv = engine(tmp_path / "nothing")
    vllm_config.load_config.load_format = "dummy"
    first = namespace(vllm_config, kv)
    vllm_config.model_config.seed = 1
    assert namespace(vllm_config, kv) != first


def test_a_commit_of_the_hub_says_it_all(tmp_path: Path) -> None:
    vllm_config, kv = engine(tmp_path)
    vllm_config.model_config.model = "somebody/model"
    vllm_config.model_config.revision = "0" * 40
    first = namespace(vllm_config, kv)
    vllm_config.model_config.revision = "1" * 40
    assert namespace(vllm_config, kv) != first


def test_weights_that_cannot_be_told_apart_are_an_error(tmp_path: Path) -> None:
    vllm_config, kv = engine(tmp_path)
    with pytest.raises(ConfigError, match=r"extra_config\.weights: .*no weights.*Give a text"):
        namespace(vllm_config, kv)
    vllm_config.model_config.model = "s3://bucket/model"
    with pytest.raises(ConfigError, match=r"extra_config\.weights"):
        namespace(vllm_config, kv)
