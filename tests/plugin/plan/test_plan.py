"""`vllm-graft plan` against vLLM's frontend, for models of the families that are served most."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.plugin.plan import plan_models
from tests.support.processes import finished
from vllm_graft.parts import PARTS

pytestmark = pytest.mark.slow

Both = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    plan_models.write_models(made)
    return made


@pytest.fixture(scope="module", params=["gpu", pytest.param("cpu", marks=pytest.mark.nightly)])
def found(request: pytest.FixtureRequest, folder: Path) -> dict[str, Both]:
    """Return plan and decision of each case, on a CPU or on a GPU that is pretended."""
    own = {"OMP_NUM_THREADS": "1", "VLLM_CACHE_ROOT": str(folder / "cache")}
    command = (sys.executable, "-P", plan_models.__file__, request.param, folder)
    said = finished(*command, env={**os.environ, **own}, timeout=500)
    return dict(json.loads(said.splitlines()[-1]))


def disagreement(plan: dict[str, Any], decision: dict[str, Any]) -> str:
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
    assert len({case.split()[0] for case in found}) > 30


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
