"""`vllm-graft plan` against vLLM's frontend, for models of the families that are served most.

What a stranger reads of it: answers that are true, and commands that keep their promise.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from tests.plugin.plan import plan_models, stranger_models
from tests.support.processes import finished
from vllm_graft.parts import PARTS
from vllm_graft.plan.memory import RANK, TOKEN, _host_tokens
from vllm_graft.spec_decode.presets.known_drafts import mtp_config

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
GIB, KIB = 1 << 30, 1 << 10

Told = dict[str, Any]
"""A plan, or a decision."""

Both = tuple[Told, Told]
Plans = dict[str, list[Told]]

DAILY = (
    "llama-3", "qwen3-moe", "qwen3-next", "kimi-linear", "qwen3.5", "gpt-oss", "gemma-3", "gemma-4",
    "deepseek-v3", "nemotron-h", "falcon-h1", "mimo", "bloom", "llama-4-text", "qwen3-vl", "llava",
    "internvl-3.5", "whisper",
)  # fmt: skip
"""A model of each kind of layers, experts, towers and refusals; the nightly job has all."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    plan_models.write_models(made)
    return made


def said(platform: str, folder: Path, *models: str) -> tuple[dict[str, Both], Plans]:
    """What the program says on a platform: plan and decision of each case, and strangers' plans."""
    own = {"OMP_NUM_THREADS": "1", "VLLM_CACHE_ROOT": str(folder / "cache")}
    own["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = (sys.executable, "-P", "-m", plan_models.__name__, platform, folder, *models)
    printed = finished(*command, env={**os.environ, **own}, timeout=500)
    found, plans = json.loads(printed.splitlines()[-1])
    return found, plans


@pytest.fixture(scope="module")
def on_gpu(folder: Path) -> tuple[dict[str, Both], Plans]:
    return said("gpu", folder, *DAILY)


NIGHTLY = [pytest.param(each, marks=pytest.mark.nightly) for each in ("gpu", "cpu")]


@pytest.fixture(scope="module", params=["daily", *NIGHTLY])
def found(request: pytest.FixtureRequest, folder: Path) -> dict[str, Both]:
    if request.param == "daily":
        return dict(request.getfixturevalue("on_gpu")[0])
    return said(request.param, folder)[0]


@pytest.fixture(scope="module")
def strangers(on_gpu: tuple[dict[str, Both], Plans]) -> Plans:
    return on_gpu[1]


def disagreement(plan: Told, decision: Told) -> str:
    """Say how a plan differs from what the frontend has decided; empty if it does not."""
    if decision["error"]:
        return "" if plan["verdict"] == "refused" else f"the frontend said {decision['error']}"
    states = {part["name"]: part["state"] for part in plan["parts"]}
    on = sorted(name for name, state in states.items() if state != "off")
    off_later = [
        part["name"]
        for part in plan["parts"]
        if part["state"] == "off" and part["name"] in decision["on"]
    ]
    # What a worker would find later is the plan's own: it must not be what the frontend knows.
    if sorted(on + off_later) != decision["on"]:
        return f"planned {on}, but the frontend has {decision['on']}"
    for part in plan["parts"]:
        if part["name"] in decision["off"] and part["reason"] != decision["off"][part["name"]]:
            return f"{part['name']}: other reasons"
    tokens = decision["tokens"]
    return "" if tokens is None or f" {tokens} " in plan["drafts"] else "another number of drafts"


def test_no_disagreement(found: dict[str, Both]) -> None:
    wrong = {case: disagreement(plan, decision) for case, (plan, decision) in found.items()}
    assert {case: text for case, text in wrong.items() if text} == {}
    assert {case.split()[0] for case in found} in ({*DAILY}, {*plan_models.MODELS})


def test_a_wrong_plan_would_be_noticed(found: dict[str, Both]) -> None:
    """Negative control: the plan of another model, or with a part off that is on."""
    plan, decision = found["llama-3 preset"]
    assert disagreement(plan, found["falcon-h1 preset"][1])
    off = [{**part, "state": "off" if part["name"] == "tree" else "on"} for part in plan["parts"]]
    assert disagreement({**plan, "parts": off}, decision)
    assert disagreement(plan, {"error": "ConfigError"})


def test_each_outcome_is_among_the_cases(found: dict[str, Both]) -> None:
    plans = {case: plan for case, (plan, _) in found.items()}
    assert {plan["verdict"] for plan in plans.values()} == {"on", "off", "refused"}
    assert plans["llama-3 preset"]["drafts"].startswith("trees of up to 63 nodes")
    assert "vLLM refuses it" in plans["mimo preset"]["refused"]
    if "bloom tree" in plans:
        assert plans["bloom chain"]["drafts"].startswith("chains of 4 tokens by 'eagle3'")
        assert "graft.tree.topk to 1 for a chain" in plans["bloom tree"]["refused"]
    else:
        assert "vision graphs in 64 MiB" in plans["qwen3-vl vision"]["parts"][1]["reason"]
        assert "does not speak vLLM's encoder" in plans["internvl-3.5 vision"]["refused"]


def test_a_plan_that_is_served_has_its_command_and_every_part(found: dict[str, Both]) -> None:
    for case, (plan, _) in found.items():
        if plan["verdict"] == "refused":
            assert plan["refused"]
            assert not plan["command"]
            continue
        assert plan["command"].startswith("vllm serve ")
        names = [part["name"] for part in plan["parts"]]
        # A preset leaves out what has nothing to do with the model.
        preset = case.endswith(" preset")
        assert names == [part.name for part in PARTS if not preset or part.name in names]
        assert "tree" in names
        assert all(part["reason"] for part in plan["parts"])
        assert plan["memory"]


def parts(plan: Told) -> dict[str, str]:
    return {part["name"]: part["state"] for part in plan["parts"]}


def reason(plan: Told, part: str) -> str:
    return str(next(each["reason"] for each in plan["parts"] if each["name"] == part))


def memory(plan: Told) -> Told:
    return {row["what"]: row for row in plan["memory"]}


def test_each_printed_command_is_planned_alike(strangers: Plans) -> None:
    for name, (plan, *again) in strangers.items():
        assert len(again) == bool(plan["command"]) + bool(plan["better"]), name
        if plan["command"]:
            same = again.pop(0)
            for key in ("verdict", "parts", "memory", "drafts", "target"):
                assert same[key] == plan[key], name
        for better in again:
            assert better["verdict"] != "refused", name
            assert better["drafts"] == plan["better"][0], name


def test_the_suggested_host_cache_keeps_the_trees(strangers: Plans) -> None:
    # Nor is more memory than this machine has refused: it is another machine that is planned.
    assert parts(strangers["llama-eagle3-host"][0]) == {"hicache": "on", "tree": "on"}


def test_each_replica_has_a_host_pool(strangers: Plans) -> None:
    for name, says in (
        ("llama-eagle3-host", f"together; {(64 << 40) // (33 * 4096)} tokens"),
        ("llama-host-replicas", f"of 2 replicas; {(64 << 40) // (32 * 4096)} tokens"),
    ):
        row = memory(strangers[name][0])["host pool"]
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
    strangers: Plans,
) -> None:
    for name, (plan, *_) in strangers.items():
        for part in plan["parts"]:
            assert "drop --" not in part["reason"], name
            assert "draft_model'" not in part["reason"], name
        assert "draft" not in parts(plan), name
        assert ("vit" in parts(plan)) == (name in ("gemma-3", "gemma-4", "qwen3.5")), name


@pytest.mark.parametrize("name", ["glm", "qwen3.5"])
def test_a_checkpoint_s_own_module_is_named(strangers: Plans, name: str) -> None:
    plan = strangers[name][0]
    flag = '--speculative-config \'{"method": "mtp", "num_speculative_tokens": 3}\''
    assert f"has an MTP module: add {flag}." in reason(plan, "tree")
    assert flag in plan["better"][1]
    assert plan["better"][0].startswith("trees of up to")
    # On this GPU vLLM's own number of requests leaves no room for states of trees.
    assert ("--max-num-seqs" in plan["better"][1]) == (name == "qwen3.5")


def test_a_module_that_vllm_can_t_load_is_not_named() -> None:
    """VLLM's configuration of Step 3.5 keeps no types of layers for its modules."""
    from vllm.transformers_utils.configs.step3p5 import Step3p5Config

    told = stranger_models.MODELS["Step-3.5-Flash"]
    model = SimpleNamespace(hf_config=Step3p5Config(**told))
    assert len(told["layer_types"]) == 48 > len(model.hf_config.layer_types) == 45
    assert mtp_config(model) is None
    model.hf_config.layer_types = told["layer_types"]
    assert mtp_config(model) == {"method": "mtp", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("llama", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
        ("gpt-oss", "RedHatAI/gpt-oss-20b-speculator.eagle3"),
        ("gemma-3", "DRAFT"),
    ],
)
def test_a_public_head_is_named(strangers: Plans, name: str, head: str) -> None:
    assert f'"model": "{head}"' in reason(strangers[name][0], "tree")


def test_a_smaller_tree_has_its_reason(strangers: Plans) -> None:
    says = reason(strangers["llama-lora"][0], "tree")
    assert "trees of up to 7 nodes" in says
    assert "With --enable-lora a step has 8 rows for each request" in says


def test_n_grams_are_no_model(strangers: Plans) -> None:
    rows = memory(strangers["qwen3-ngram"][0])
    assert not any("draft" in what for what in rows)


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("qwen3-large", "each GPU needs 71.3 GiB (61.3 GiB for weights"),
        ("qwen3-long", "for K/V of one"),
    ],
)
def test_what_does_not_fit_is_refused(strangers: Plans, name: str, needs: str) -> None:
    plan = strangers[name][0]
    assert plan["verdict"] == "refused"
    assert not plan["command"]
    assert "It does not fit" in plan["refused"]
    assert needs in plan["refused"]
    assert "room for K/V" not in memory(plan)


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        # By arithmetic on the shapes; quantized ones with their scales.
        ("llama", 8_030_261_248 * 2),
        ("gpt-oss", 13.7 * GIB),
        # Quantized while it loads: layers with a byte per weight, and the table of tokens as it is.
        ("quantized", 440.4e6 + 151_936 * 1024 * 2),
        ("glm", (17 * 3.934e9 + 3 * 0.325e9 + 3.1e9) / 8),
    ],
)
def test_weights_are_counted(strangers: Plans, name: str, num_bytes: float) -> None:
    row = memory(strangers[name][0])["weights of the target"]
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
def test_k_v_is_counted_by_layer(strangers: Plans, name: str, what: str, num_bytes: int) -> None:
    # The last command has the draft, if there is one.
    row = memory(strangers[name][-1])[what]
    assert (row["num_bytes"], row["per"]) == (num_bytes, TOKEN)


def test_the_scratch_of_a_module_is_that_of_its_own_layer(
    strangers: Plans,
) -> None:
    """Its configuration has the number of the target's layers."""
    plan = strangers["hy"][-1]
    assert memory(plan)["K/V of the draft"]["num_bytes"] == 2 * 128 * 2
    # 1024 requests, and in each 3 levels of 8 nodes with K and V of a head.
    held = 1024 * 3 * 8 * 2 * 128 * 2
    assert memory(plan)["scratch of the tree's K/V"]["num_bytes"] == held


def test_windows_hold_their_window_only(strangers: Plans) -> None:
    """Layers with a window keep no more of a long text than the window."""
    room = memory(strangers["gemma-3"][0])["room for K/V"]
    tokens = int(room["says"].rpartition("; ")[2].split()[0])
    assert tokens > 3 * room["num_bytes"] // (62 * 8 * KIB)
