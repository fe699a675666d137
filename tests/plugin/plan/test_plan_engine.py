"""`plan` against real engines on the CPU: which parts run, and what memory they take."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.plugin.plan import plan_models
from tests.support.models.latent_models import RANK, ROPE, write_target
from tests.support.models.window_models import write_gemma4, write_gemma4_assistant
from vllm_graft.plan.planning import Plan, make_plan
from vllm_graft.plan.request import Request, inspecting
from vllm_graft.testing import cpu_engine, greedy
from vllm_graft.testing.engine import default_options, model_runner

pytestmark = pytest.mark.engine

WINDOWS: list[dict[str, Any]] = [{}, {"draft_window": 32}]
SAME = ("block_size", "dtype", "max_model_len", "max_num_batched_tokens", "max_num_seqs")

LAYER = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128
"""Weights in the products of one layer of `llama-3`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    plan_models.write_models(made)
    return made


def plan_of(folder: Path, name: str, graft: Any) -> Plan:
    found = plan_models.flags(folder, name, graft, drafts=True)
    for option in SAME:
        found += [f"--{option.replace('_', '-')}", str(default_options()[option])]
    with inspecting():
        return make_plan(Request.parse([*found, "--enforce-eager"]), "test")


def engine(folder: Path, name: str, graft: Any) -> Any:
    return cpu_engine(
        str(folder / name),
        load_format="dummy",
        skip_tokenizer_init=True,
        speculative_config=plan_models.speculative(folder),
        additional_config={"graft": graft},
    )


def states(plan: Plan) -> dict[str, str]:
    return {part.name: part.state for part in plan.parts}


def test_parts_and_memory_of_an_engine_are_as_planned(folder: Path) -> None:
    plan = plan_of(folder, "llama-3", {"tree": {"nodes": 7, "topk": 4}})
    planned = {row.what: row.num_bytes for row in plan.memory}
    with engine(folder, "llama-3", {"tree": {"nodes": 7, "topk": 4}}) as llm:
        [told] = llm.collective_rpc("graft_info")
        runner = model_runner(llm)
        drafter = runner.speculator
        # On a CPU, products keep a packed copy of their weights, and these are let go.
        kept = sum(each.nbytes for each in runner.model.parameters())
        held = sum(each.page_size_bytes for each in specs(runner).values()) // 32
        work = drafter.context.workspace
        workspace = sum(each.nbytes for each in (work.acc, work.peak, work.total))
        scratch = next(iter(drafter.trees.plans.values())).growth.scratch
        in_scratch = sum(each.nbytes for each in scratch.values())
        del runner, drafter, work, scratch
    assert told["parts"] == ["tree"]
    off = dict.fromkeys(("hicache", "vit", "draft", "learn"), "off")
    assert states(plan) == {**off, "tree": "on"}
    assert planned["weights of the target"] == kept + 4 * 4 * LAYER
    assert planned["K/V of the target"] + planned["K/V of the draft"] == held
    assert planned["workspace of tree attention"] == workspace
    assert planned["scratch of the tree's K/V"] == in_scratch


def test_a_window_of_the_draft_is_told(folder: Path) -> None:
    tree = {"nodes": 7, "topk": 4}
    plain, plan = (plan_of(folder, "llama-3", {"tree": tree | more}) for more in WINDOWS)
    assert "the draft reads the last 32 tokens and the first block" in plan.drafts
    assert "the draft reads" not in plain.drafts
    rows = {row.what: row for row in plan.memory}
    added = {row.what for row in plan.memory} - {row.what for row in plain.memory}
    assert added == {"tables of the draft's window"}
    with engine(folder, "llama-3", {"tree": tree | WINDOWS[1]}) as llm:
        assert greedy(llm, [[5] * 100], 4)
        layers = model_runner(llm).vllm_config.compilation_config.static_forward_context.values()
        windows = [getattr(getattr(each, "impl", None), "window", None) for each in layers]
        tables = [each._levels for each in windows if each is not None]
        # One request runs.
        held = sum(each.nbytes for pair in tables for each in pair)
        del layers, windows, tables
    held *= default_options()["max_num_seqs"]
    assert rows["tables of the draft's window"].num_bytes == held > 0
    for who in ("K/V of the draft", "scratch of the tree's K/V"):
        assert rows[who] in plain.memory


def specs(runner: Any) -> dict[str, Any]:
    """Return the K/V spec of each layer."""
    found = {}
    for group in runner.kv_cache_config.kv_cache_groups:
        for name in group.layer_names:
            spec = group.kv_cache_spec
            found[name] = getattr(spec, "kv_cache_specs", {}).get(name, spec)
    return found


def test_a_preset_of_an_engine_is_as_planned(folder: Path) -> None:
    plan = plan_of(folder, "gpt-oss", plan_models.PRESET)
    with engine(folder, "gpt-oss", plan_models.PRESET) as llm:
        [told] = llm.collective_rpc("graft_info")
    on = told["preset"]["on"]
    assert {name for name, state in states(plan).items() if state == "on"} == {*on}
    assert {p.name: p.reason for p in plan.parts if p.state == "off"} == told["preset"]["off"]


def test_a_target_that_gives_the_draft_nothing_is_refused(folder: Path) -> None:
    plan = plan_of(folder, "gemma-2", plan_models.CHAIN)
    assert "gives no hidden states to an EAGLE-3 draft" in plan.refused
    with (
        pytest.raises(RuntimeError, match="does not support EAGLE3"),
        engine(folder, "gemma-2", plan_models.CHAIN),
    ):
        pass


def test_the_scratch_of_a_draft_with_latents_is_as_planned(tmp_path: Path) -> None:
    """A latent and its rotated part of each node, where plain attention has K and V."""
    target = str(write_target(tmp_path / "target"))
    speculative = {"method": "mtp", "num_speculative_tokens": 7}
    graft = {"graft": {"tree": {"topk": 3, "steps": 4}}}
    found = [target, "--speculative-config", json.dumps(speculative)]
    found += ["--additional-config", json.dumps(graft), "--attention-backend", "CPU_MLA"]
    found += ["--max-num-seqs", "8", "--dtype", "float32", "--max-model-len", "256"]
    with inspecting():
        plan = make_plan(Request.parse([*found, "--enforce-eager"]), "test")
    assert states(plan)["tree"] == "on"
    planned = {row.what: row.num_bytes for row in plan.memory}
    options: dict[str, Any] = {"speculative_config": speculative, "additional_config": graft}
    with cpu_engine(target, attention_backend="CPU_MLA", **options) as llm:
        held = model_runner(llm).speculator.memory.num_bytes
    assert planned["scratch of the tree's K/V"] == held == 8 * 3 * 4 * (RANK + ROPE) * 4


def test_an_assistant_that_reads_the_target_s_cache_keeps_nothing(tmp_path: Path) -> None:
    target, draft = write_gemma4(tmp_path / "target"), write_gemma4_assistant(tmp_path / "draft")
    speculative = {"method": "mtp", "model": str(draft), "num_speculative_tokens": 7}
    graft = {"graft": {"tree": {"topk": 3, "steps": 4}}}
    found = [str(target), "--speculative-config", json.dumps(speculative), "--enforce-eager"]
    found += ["--additional-config", json.dumps(graft), "--skip-tokenizer-init"]
    with inspecting():
        plan = make_plan(Request.parse([*found, "--max-model-len", "256"]), "test")
    assert states(plan)["tree"] == "on"
    planned = {row.what: row.num_bytes for row in plan.memory}
    assert planned["scratch of the tree's K/V"] == 0
    assert planned["K/V of the target"] == 2 * 64 * 2
    assert not any(what.startswith("K/V of the draft") for what in planned)
