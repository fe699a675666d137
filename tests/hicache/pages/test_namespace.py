"""Any change that gives a page another meaning gives it another namespace."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.vllm_configs import model_at, vllm_config_at
from vllm_graft.base.errors import ConfigError
from vllm_graft.hicache.pages import weights as weights_module
from vllm_graft.hicache.pages.inputs import INPUTS, Engine
from vllm_graft.hicache.pages.namespace import NAMESPACE_START, namespace, namespace_start
from vllm_graft.hicache.pages.weights import checkpoint_fingerprint


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{n}": torch.randn(40, 64, generator=generator) for n in range(20)}


def keep_time(path: Path) -> None:
    """Keep the time of modification at one value, as a tool that preserves times would."""
    os.utime(path, ns=(0, 0))


@pytest.fixture
def unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the times of change tell nothing, so that only the bytes do."""
    monkeypatch.setattr(weights_module, "_times", lambda status: str(status.st_mtime_ns))


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
@pytest.mark.usefixtures("unchanged")
def test_other_weights_at_the_same_path(checkpoint: Path, change: Callable[[Path], None]) -> None:
    before = checkpoint_fingerprint(checkpoint)
    assert checkpoint_fingerprint(checkpoint) == before
    change(checkpoint)
    for file in checkpoint.glob("*.safetensors"):
        keep_time(file)
    assert checkpoint_fingerprint(checkpoint) != before


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    """A tensor of 64 MiB in a sparse file, of which most rows are not sampled."""
    header = b'{"embed":{"dtype":"F32","shape":[65536,256],"data_offsets":[0,67108864]}}'
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + (64 << 20))
    keep_time(tmp_path / "model.safetensors")
    return tmp_path


def mend(path: Path, first: int, rows: int) -> None:
    """Write rows of the tensor in place, and keep the time of modification."""
    file = path / "model.safetensors"
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size - (64 << 20) + first * 1024)
        stream.write(b"\1" * (rows * 1024))
    keep_time(file)


def test_rows_mended_in_place_show_in_the_time_of_change(sparse: Path) -> None:
    seen = {checkpoint_fingerprint(sparse)}
    assert checkpoint_fingerprint(sparse) in seen
    for row in range(10):
        mend(sparse, 300 + row, 1)
        seen.add(checkpoint_fingerprint(sparse))
    assert len(seen) == 11


@pytest.mark.usefixtures("unchanged")
def test_a_large_tensor_is_sampled_in_many_places(sparse: Path) -> None:
    """A mended part as long as the distance of two samples is seen, wherever it lies."""
    seen, files = {checkpoint_fingerprint(sparse)}, len(os.listdir("/proc/self/fd"))
    for part in range(20):
        mend(sparse, part * 3000, 33)
        seen.add(checkpoint_fingerprint(sparse))
    assert len(seen) == 21
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.usefixtures("unchanged")
def test_a_small_checkpoint_is_read_completely(checkpoint: Path) -> None:
    before = checkpoint_fingerprint(checkpoint)
    file = checkpoint / "model-0.safetensors"
    content = bytearray(file.read_bytes())
    for position in range(len(content) - 20 * 40 * 64 * 4, len(content), 5003):
        content[position] ^= 1
        file.write_bytes(content)
        keep_time(file)
        assert checkpoint_fingerprint(checkpoint) != before
        content[position] ^= 1


def test_a_restart_and_another_place_keep_the_fingerprint(checkpoint: Path, tmp_path: Path) -> None:
    before = checkpoint_fingerprint(checkpoint)
    (checkpoint / "model-0.safetensors").read_bytes()
    moved = checkpoint.rename(tmp_path.with_name(tmp_path.name + "-elsewhere"))
    assert checkpoint_fingerprint(moved) == before


@pytest.mark.parametrize("suffix", [".gguf", ".bin", ".pt", ".safetensors"])
@pytest.mark.usefixtures("unchanged")
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


@pytest.mark.usefixtures("unchanged")
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


def engine(path: Path) -> Engine:
    """Make what the inputs are read from, with a stand-in for a KVCacheConfig."""
    group = SimpleNamespace(kv_cache_spec=Spec(), layer_names=["layer.0", "layer.1"])
    kv = SimpleNamespace(hash_block_size=16, kv_cache_layout="LBHNC", kv_cache_groups=[group])
    attention = {"CPUAttentionBackend vec": ["layer.0", "layer.1"]}
    return Engine(
        vllm_config_at(path),
        options={"kv_layout": None, "host_dtype": None},
        kv_cache_config=kv,
        attention=attention,
        layout={"shards": 1},
    )


def test_the_same_engine_has_the_same_namespace(checkpoint: Path) -> None:
    first, again = namespace(engine(checkpoint)), namespace(engine(checkpoint))
    assert first == again
    assert len(first) == 16


Change = Callable[[Engine, Path, pytest.MonkeyPatch], Engine | None]


def config(*path: str, value: object) -> Change:
    """Set a value in vLLM's configuration."""

    def change(found: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        target = found.vllm_config
        for name in path[:-1]:
            target = getattr(target, name)
        if isinstance(target, dict):
            target[path[-1]] = value
        else:
            setattr(target, path[-1], value)

    return change


def pools(name: str, value: object) -> Change:
    """Set a value in vLLM's configuration of the KV cache, or in that of its first group."""

    def change(found: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        kv = found.kv_cache_config
        setattr(kv if hasattr(kv, name) else kv.kv_cache_groups[0], name, value)

    return change


def fields(**values: Any) -> Change:
    """Set what only a loaded model tells, or what the user has asked for."""
    return lambda found, folder, monkeypatch: replace(found, **values)


def write(name: str, content: str) -> Change:
    """Write a file into the model's folder."""

    def change(found: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / name).write_text(content)

    return change


def patch(path: str, value: object) -> Change:
    """Let something outside of the engine be otherwise."""
    return lambda found, folder, monkeypatch: monkeypatch.setattr(path, value)


def in_another_snapshot(
    found: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Engine | None:
    """Rename the folder, as if it came from a commit."""
    snapshots = folder.with_name(folder.name + "-hub") / "snapshots"
    snapshots.mkdir(parents=True)
    found.vllm_config.model_config.model = str(folder.rename(snapshots / ("c" * 40)))
    return None


def with_a_draft(found: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found.vllm_config.speculative_config = SimpleNamespace(
        draft_model_config=model_at(folder), method="eagle3"
    )


def with_a_given_block_size(found: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found.vllm_config.cache_config.user_specified_block_size = True


def with_a_layout(found: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")


def with_other_weights(found: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_a_tensor(folder)


MODEL = "model_config"
LONG_ROPE = {"rope_type": "longrope"}
CHANGES: dict[str, list[Change]] = {
    "format": [patch("vllm_graft.hicache.pages.inputs.FORMAT", 2)],
    "vLLM": [patch("vllm.__version__", "0.99")],
    "device": [patch("vllm.platforms.current_platform.device_type", "tpu")],
    "weights": [with_other_weights, fields(weights="v1")],
    "commit": [in_another_snapshot],
    "loader": [
        config("load_config", "load_format", value="safetensors"),
        config("load_config", "model_loader_extra_config", "x", value=1),
    ],
    "config": [
        config(MODEL, "hf_values", "hidden_size", value=65),
        config(MODEL, "hf_values", "rope_theta", value=5e5),
        config(MODEL, "hf_values", "rms_norm_eps", value=0.1),
    ],
    "longest request": [config(MODEL, "hf_values", "rope_scaling", value=LONG_ROPE)],
    "code": [
        write("modeling_own.py", "pass"),
        config(MODEL, "model_impl", value="transformers"),
    ],
    "dtype": [config(MODEL, "dtype", value=torch.float16)],
    "quantization": [
        config(MODEL, "quantization", value="fp8"),
        config(MODEL, "quantization_config", value={"linear": "fp8"}),
    ],
    "modalities": [
        write("preprocessor_config.json", '{"image_mean": [0.1]}'),
        write("processor_config.json", "{}"),
        write("video_preprocessor_config.json", "{}"),
        write("tekken.json", "{}"),
        config(MODEL, "multimodal_config", "mm_processor_kwargs", value={"size": 1}),
        config(MODEL, "multimodal_config", "media_io_kwargs", "video", value={"num_frames": 2}),
        config(MODEL, "multimodal_config", "video_pruning_rate", value=0.5),
        patch("transformers.__version__", "99"),
    ],
    "draft": [with_a_draft],
    "LoRA": [config("lora_config", value=object())],
    "weight transfer": [config("weight_transfer_config", value=object())],
    "KV dtype": [
        config("cache_config", "cache_dtype", value="fp8"),
        config("cache_config", "kv_cache_dtype_skip_layers", value=["0"]),
    ],
    "block size": [with_a_given_block_size],
    "hash": [config("cache_config", "prefix_caching_hash_algo", value="xxhash")],
    "window": [config(MODEL, "disable_sliding_window", value=True)],
    "backend": [config("attention_config", "backend", value="TRITON_ATTN")],
    "layout": [with_a_layout],
    "options": [fields(options={"host_dtype": "fp8", "kv_layout": None})],
    "parallel sizes": [
        config("parallel_config", name, value=2)
        for name in (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "prefill_context_parallel_size",
            "decode_context_parallel_size",
            "cp_kv_cache_interleave_size",
            "enable_expert_parallel",
        )
    ],
    "replica": [config("parallel_config", "data_parallel_index", value=1)],
    "states": [config("cache_config", "mamba_ssm_cache_dtype", value="float32")],
    "pools": [pools("kv_cache_spec", Spec(32)), pools("layer_names", ["layer.0"])],
    "hash blocks": [
        pools("hash_block_size", 32),
        config("num_hash_lookahead_tokens", value=1),
    ],
    "pool layout": [pools("kv_cache_layout", "LBNHC")],
    "attention": [
        fields(attention={"TorchAttentionBackend": ["layer.0", "layer.1"]}),
        fields(attention={"CPUAttentionBackend amx": ["layer.0", "layer.1"]}),
        fields(attention=None),
    ],
    "host layout": [fields(layout={"shards": 2})],
}
CASES = [(name, number) for name, changes in CHANGES.items() for number in range(len(changes))]
# A draft has weights, a configuration and so on as well, and rope is in the configuration.
ALSO = {"draft": None, "longest request": {"config"}}


def test_every_input_has_a_change() -> None:
    assert list(CHANGES) == [row.name for row in INPUTS]


@pytest.mark.parametrize(("name", "number"), CASES)
def test_one_input_alone_makes_another_namespace(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    """Exactly the changed input reads otherwise, and both namespaces differ where they have to."""
    first = engine(checkpoint)
    values = {row.name: str(row.read(first)) for row in INPUTS}
    whole, start = namespace(first), namespace_start(first)
    assert whole[:NAMESPACE_START] == start
    changed = CHANGES[name][number](first, checkpoint, monkeypatch) or first
    differ = {row.name for row in INPUTS if str(row.read(changed)) != values[row.name]}
    also = ALSO.get(name, set())
    assert name in differ
    assert also is None or differ == {name} | also
    assert namespace(changed) != whole
    [row] = [row for row in INPUTS if row.name == name]
    assert (namespace_start(changed) != start) == row.early


def test_the_docs_list_every_input() -> None:
    docs = (Path(__file__).parents[3] / "docs" / "hicache.md").read_text()
    missing = [row.name for row in INPUTS if f"| {row.name} | {row.says} |" not in docs]
    assert missing == []


@pytest.mark.parametrize(
    "change",
    [
        config("weight_transfer_config", value=object()),
        fields(attention=None),
    ],
)
def test_what_no_file_tells_is_shared_with_nobody(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    found = engine(checkpoint)
    found = change(found, checkpoint, monkeypatch) or found
    assert namespace(found) != namespace(found)


def test_adapters_are_shared_with_nobody_where_their_pages_go_to_storage(checkpoint: Path) -> None:
    found = engine(checkpoint)
    found.vllm_config.lora_config = object()
    assert namespace(found) == namespace(found)
    held = replace(found, holds_adapters=True)
    assert namespace(held) != namespace(held)


def test_a_block_size_that_vllm_has_chosen_may_change(checkpoint: Path) -> None:
    found = engine(checkpoint)
    before = namespace_start(found)
    found.vllm_config.cache_config.block_size = 32
    found.vllm_config.cache_config.user_specified_block_size = False
    assert namespace_start(found) == before


def test_where_the_files_lie_does_not_count(checkpoint: Path, tmp_path: Path) -> None:
    before = namespace(engine(checkpoint))
    moved = checkpoint.rename(tmp_path.with_name(tmp_path.name + "-moved"))
    assert namespace(engine(moved)) == before


def test_processors_do_not_count_for_text(checkpoint: Path) -> None:
    found = engine(checkpoint)
    found.vllm_config.model_config.multimodal_config = None
    before = namespace(found)
    (checkpoint / "preprocessor_config.json").write_text("{}")
    assert namespace(found) == before


def test_the_draft_counts(checkpoint: Path) -> None:
    found = engine(checkpoint)
    draft = model_at(checkpoint)
    found.vllm_config.speculative_config = SimpleNamespace(
        draft_model_config=draft, method="eagle3"
    )
    with_draft = namespace(found)
    draft.hf_values["hidden_size"] = 66
    assert namespace(found) != with_draft


def test_an_explicit_identity_stands_for_the_weights_alone(checkpoint: Path) -> None:
    found = replace(engine(checkpoint), weights="v1")
    first = namespace(found)
    change_a_tensor(checkpoint)
    assert namespace(found) == first
    assert namespace(replace(found, weights="v2")) != first
    (checkpoint / "preprocessor_config.json").write_text("{}")
    assert namespace(found) != first


def test_long_rope_depends_on_the_longest_request(checkpoint: Path) -> None:
    found = engine(checkpoint)
    model = found.vllm_config.model_config
    plain = namespace(found)
    model.max_model_len = 8192
    assert namespace(found) == plain
    model.hf_values["rope_scaling"] = {"rope_type": "longrope"}
    long = namespace(found)
    model.max_model_len = 4096
    assert namespace(found) != long


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    found = engine(tmp_path / "nothing")
    found.vllm_config.load_config.load_format = "dummy"
    first = namespace(found)
    found.vllm_config.model_config.seed = 1
    assert namespace(found) != first


def test_a_commit_of_the_hub_says_it_all(tmp_path: Path) -> None:
    found = engine(tmp_path)
    found.vllm_config.model_config.model = "somebody/model"
    found.vllm_config.model_config.revision = "0" * 40
    first = namespace(found)
    found.vllm_config.model_config.revision = "1" * 40
    assert namespace(found) != first


def test_two_snapshots_that_differ_in_a_processor_alone(tmp_path: Path) -> None:
    """They share the blobs of their weights, and are told by the file and by the commit."""
    blob = tmp_path / "blobs" / ("f" * 64)
    blob.parent.mkdir()
    save_file(tensors(), blob)
    found = []
    for commit in ("a" * 40, "b" * 40):
        snapshot = tmp_path / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").symlink_to(blob)
        (snapshot / "preprocessor_config.json").write_text(commit[:1])
        found.append({row.name: str(row.read(engine(snapshot))) for row in INPUTS})
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["modalities"] != found[1]["modalities"]
    assert found[0]["commit"] != found[1]["commit"]


def test_weights_that_cannot_be_told_apart_are_an_error(tmp_path: Path) -> None:
    found = engine(tmp_path)
    with pytest.raises(ConfigError, match=r"extra_config\.weights: .*no weights.*Give a text"):
        namespace(found)
    found.vllm_config.model_config.model = "s3://bucket/model"
    with pytest.raises(ConfigError, match=r"extra_config\.weights"):
        namespace(found)
