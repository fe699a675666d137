"""What a stranger reads: answers that are true, and commands that keep their promise."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from tests.plugin.plan import stranger_models
from vllm_graft.plan.memory import RANK, TOKEN, _host_tokens

pytestmark = pytest.mark.slow

GIB, KIB = 1 << 30, 1 << 10


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("models")
    stranger_models.write_models(folder)
    done = subprocess.run(
        [sys.executable, "-P", str(Path(stranger_models.__file__)), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CACHE_ROOT": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Traceback" not in done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def parts(plan: dict[str, Any]) -> dict[str, str]:
    return {part["name"]: part["state"] for part in plan["parts"]}


def reason(plan: dict[str, Any], part: str) -> str:
    return str(next(each["reason"] for each in plan["parts"] if each["name"] == part))


def memory(plan: dict[str, Any]) -> dict[str, Any]:
    return {row["what"]: row for row in plan["memory"]}


def test_each_printed_command_is_planned_alike(found: dict[str, list[dict[str, Any]]]) -> None:
    for name, (plan, *again) in found.items():
        assert len(again) == bool(plan["command"]) + bool(plan["better"]), name
        if plan["command"]:
            same = again.pop(0)
            for key in ("verdict", "parts", "memory", "drafts", "target"):
                assert same[key] == plan[key], name
        for better in again:
            assert better["verdict"] != "refused", name
            assert better["drafts"] == plan["better"][0], name


def test_the_suggested_host_cache_keeps_the_trees(found: dict[str, list[dict[str, Any]]]) -> None:
    # Nor is more memory than this machine has refused: it is another machine that is planned.
    assert parts(found["llama-eagle3-host"][0]) == {"hicache": "on", "tree": "on"}


def test_each_replica_has_a_host_pool(found: dict[str, list[dict[str, Any]]]) -> None:
    for name, says in (
        ("llama-eagle3-host", f"together; {(64 << 40) // (33 * 4096)} tokens"),
        ("llama-host-replicas", f"of 2 replicas; {(64 << 40) // (32 * 4096)} tokens"),
    ):
        row = memory(found[name][0])["host pool"]
        assert (row["num_bytes"], row["per"]) == (64 << 40, "host")
        assert row["says"].endswith(says)


@pytest.mark.parametrize("draft_is_sharded", [False, True])
def test_latents_count_once_on_the_host(draft_is_sharded: bool) -> None:
    """A draft that each rank has a part of makes all of them keep pages of their own."""
    sizes: dict[str, Any] = {"block_size": 64, "num_kv_heads": 1, "dtype": torch.bfloat16}
    latents = MLAAttentionSpec(head_size=576, max_tp_shards=1, **sizes)
    heads = FullAttentionSpec(head_size=128, **sizes)
    specs: dict[str, Any] = {"a": latents, "b": heads if draft_is_sharded else latents}
    config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=4))
    each = 4 * (1152 + 512) if draft_is_sharded else 2 * 1152
    assert _host_tokens(1 << 30, specs, config) == f"; {(1 << 30) // each} tokens"
    window = {"c": FullAttentionSpec(head_size=128, sliding_window=128, **sizes)}
    assert _host_tokens(1 << 30, specs | window, config) == ""


def test_a_preset_gives_no_advice_about_what_nobody_asked_for(
    found: dict[str, list[dict[str, Any]]],
) -> None:
    for name, (plan, *_) in found.items():
        for part in plan["parts"]:
            assert "drop --" not in part["reason"], name
            assert "draft_model'" not in part["reason"], name
        assert "draft" not in parts(plan), name
        assert ("vit" in parts(plan)) == (name in ("gemma-3", "gemma-4", "qwen3.5")), name


@pytest.mark.parametrize("name", ["glm", "qwen3.5"])
def test_a_checkpoint_s_own_module_is_named(
    found: dict[str, list[dict[str, Any]]], name: str
) -> None:
    plan = found[name][0]
    flag = '--speculative-config \'{"method": "mtp", "num_speculative_tokens": 3}\''
    assert f"has an MTP module: add {flag}." in reason(plan, "tree")
    assert flag in plan["better"][1]
    assert plan["better"][0].startswith("trees of up to")
    # On this GPU vLLM's own number of requests leaves no room for states of trees.
    assert ("--max-num-seqs" in plan["better"][1]) == (name == "qwen3.5")


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("llama", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
        ("gpt-oss", "RedHatAI/gpt-oss-20b-speculator.eagle3"),
        ("gemma-3", "DRAFT"),
    ],
)
def test_a_public_head_is_named(
    found: dict[str, list[dict[str, Any]]], name: str, head: str
) -> None:
    assert f'"model": "{head}"' in reason(found[name][0], "tree")


def test_a_smaller_tree_has_its_reason(found: dict[str, list[dict[str, Any]]]) -> None:
    says = reason(found["llama-lora"][0], "tree")
    assert "trees of up to 7 nodes" in says
    assert "With --enable-lora a step has 8 rows for each request" in says


def test_n_grams_are_no_model(found: dict[str, list[dict[str, Any]]]) -> None:
    rows = memory(found["qwen3-ngram"][0])
    assert not any("draft" in what for what in rows)


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("qwen3-large", "each GPU needs 71.3 GiB (61.3 GiB for weights"),
        ("qwen3-long", "for K/V of one"),
    ],
)
def test_what_does_not_fit_is_refused(
    found: dict[str, list[dict[str, Any]]], name: str, needs: str
) -> None:
    plan = found[name][0]
    assert plan["verdict"] == "refused"
    assert not plan["command"]
    assert "It does not fit" in plan["refused"]
    assert needs in plan["refused"]
    assert "room for K/V" not in memory(plan)


@pytest.mark.parametrize(
    ("name", "what", "num_bytes"),
    [
        # By arithmetic on the shapes; quantized ones with their scales.
        ("llama", "weights of the target", 8_030_261_248 * 2),
        ("gpt-oss", "weights of the target", 13.7 * GIB),
        # Quantized while it loads: layers with a byte per weight, and the table of tokens as it is.
        ("quantized", "weights of the target", 440.4e6 + 151_936 * 1024 * 2),
        ("glm", "weights of the target", (17 * 3.934e9 + 3 * 0.325e9 + 3.1e9) / 8),
    ],
)
def test_weights_are_counted(
    found: dict[str, list[dict[str, Any]]], name: str, what: str, num_bytes: float
) -> None:
    row = memory(found[name][0])[what]
    assert row["per"] == RANK
    assert row["num_bytes"] == pytest.approx(num_bytes, rel=0.05)


@pytest.mark.parametrize(
    ("name", "what", "num_bytes"),
    [
        ("gemma-3", "K/V of the target", 10 * 2 * 16 * 128 * 2),
        ("gemma-3", "K/V of the target in windows", 52 * 2 * 16 * 128 * 2),
        ("gemma-4", "K/V of the target", 10 * 2 * 4 * 512 * 2),
        ("gemma-4", "K/V of the target in windows", 50 * 2 * 16 * 256 * 2),
        ("glm", "K/V of the target", 20 * 2 * 128 * 2),
        # A module is one layer, whatever the target's number.
        ("glm", "K/V of the draft", 2 * 128 * 2),
    ],
)
def test_k_v_is_counted_by_layer(
    found: dict[str, list[dict[str, Any]]], name: str, what: str, num_bytes: int
) -> None:
    # The last command has the draft, if there is one.
    row = memory(found[name][-1])[what]
    assert (row["num_bytes"], row["per"]) == (num_bytes, TOKEN)


def test_the_scratch_of_a_module_is_that_of_its_own_layer(
    found: dict[str, list[dict[str, Any]]],
) -> None:
    """Its configuration has the number of the target's layers."""
    plan = found["hy"][-1]
    assert memory(plan)["K/V of the draft"]["num_bytes"] == 2 * 128 * 2
    # 1024 requests, and in each 3 levels of 8 nodes with K and V of a head.
    held = 1024 * 3 * 8 * 2 * 128 * 2
    assert memory(plan)["scratch of the tree's K/V"]["num_bytes"] == held


def test_windows_hold_their_window_only(found: dict[str, list[dict[str, Any]]]) -> None:
    """Layers with a window keep no more of a long text than the window."""
    room = memory(found["gemma-3"][0])["room for K/V"]
    tokens = int(room["says"].rpartition("; ")[2].split()[0])
    assert tokens > 3 * room["num_bytes"] // (62 * 8 * KIB)
