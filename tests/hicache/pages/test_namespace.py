"""Any change that gives a page another meaning gives it another namespace."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.checkpoints import change_a_tensor, tensors, write_parts
from tests.support.vllm_configs import model_at, vllm_config_at
from vllm_graft.base.errors import ConfigError
from vllm_graft.hicache.pages.namespace import (
    INPUTS,
    NAMESPACE_START,
    Engine,
    namespace,
    namespace_start,
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_parts(tmp_path)


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
    "format": [patch("vllm_graft.hicache.pages.namespace.FORMAT", 2)],
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
    "code": [write("modeling_own.py", "pass"), config(MODEL, "model_impl", value="transformers")],
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
    "hash blocks": [pools("hash_block_size", 32), config("num_hash_lookahead_tokens", value=1)],
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


def test_a_draft_may_be_loaded_otherwise(checkpoint: Path) -> None:
    """Real weights beside a target with dummy ones: its files count."""
    found = engine(checkpoint)
    with_a_draft(found, checkpoint, pytest.MonkeyPatch())
    found.vllm_config.load_config.load_format = "dummy"
    inputs = {row.name: row for row in INPUTS}
    loaders = inputs["loader"].read(found)
    own = SimpleNamespace(load_format="auto", model_loader_extra_config={})
    found.vllm_config.speculative_config.draft_load_config = own
    weights = inputs["weights"].read(found)
    assert inputs["loader"].read(found) != loaders
    change_a_tensor(checkpoint)
    now = inputs["weights"].read(found)
    assert now["target"] == weights["target"]
    assert now["draft"] != weights["draft"]
    config = str(inputs["config"].read(found))
    found.vllm_config.speculative_config.draft_model_config.hf_values["hidden_size"] = 66
    assert str(inputs["config"].read(found)) != config


def test_the_scales_of_an_encoder_count(checkpoint: Path) -> None:
    """A file beside the model, whose name alone says nothing."""
    found, scales = engine(checkpoint), checkpoint / "scales.txt"
    scales.write_text("1")
    found.vllm_config.model_config.multimodal_config.mm_encoder_fp8_scale_path = str(scales)
    [row] = [row for row in INPUTS if row.name == "modalities"]
    before = str(row.read(found))
    scales.write_text("2")
    assert str(row.read(found)) != before


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


def test_replicas_have_one_namespace_in_shared_memory(checkpoint: Path) -> None:
    """Storage has one for each, as one engine at a time has a namespace of it open."""
    one = engine(checkpoint)
    other = replace(one, vllm_config=copy.deepcopy(one.vllm_config))
    other.vllm_config.parallel_config.data_parallel_index = 3
    assert namespace(one) != namespace(other)
    assert namespace(replace(one, common=True)) == namespace(replace(other, common=True))


def test_the_docs_list_every_input() -> None:
    docs = (Path(__file__).parents[3] / "docs" / "hicache.md").read_text()
    missing = [row.name for row in INPUTS if f"| {row.name} | {row.says} |" not in docs]
    assert missing == []


@pytest.mark.parametrize(
    "change", [config("weight_transfer_config", value=object()), fields(attention=None)]
)
def test_what_no_file_tells_is_shared_with_nobody(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    found = engine(checkpoint)
    found = change(found, checkpoint, monkeypatch) or found
    assert namespace(found) != namespace(found)


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
