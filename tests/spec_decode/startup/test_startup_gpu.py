"""Starts on a device: kernels that were compiled ahead are found by the worker's own launches."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.shipped_pair import SHIPPED
from tests.support.processes import finished

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.timeout(900)]

START = """
import json, sys
from vllm import LLM, SamplingParams

target, draft, prompts = json.loads(sys.argv[1])
llm = LLM(
    target,
    speculative_config={"method": "eagle3", "model": draft, "num_speculative_tokens": 15},
    additional_config={"graft": {"tree": {"topk": 4, "steps": 4, "shape": "auto"}}},
    max_model_len=512,
    max_num_seqs=8,
    gpu_memory_utilization=0.3,
    kv_cache_memory_bytes=2**30,
)
outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
[info] = llm.collective_rpc("graft_info")
tokens = [list(output.outputs[0].token_ids) for output in outputs]
print("FOUND" + json.dumps([tokens, info["counters"]["tree"]["start"]]))
"""


def start(caches: Path, **variables: str) -> tuple[Any, dict[str, Any]]:
    """Tokens of an engine in a process of its own, and what its start took."""
    prompts = json.loads((SHIPPED / "prompts.json").read_text())[:3]
    plan = [str(SHIPPED / "target"), str(SHIPPED / "eagle3"), prompts]
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_CACHE_DIR"}
    places = {"TRITON_HOME": caches, "TORCHINDUCTOR_CACHE_DIR": caches / "torch"}
    own = {
        **{name: str(place) for name, place in places.items()},
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }
    command = (sys.executable, "-c", START, json.dumps(plan))
    said = finished(*command, env=kept | variables | own, timeout=290)
    [line] = [line for line in said.splitlines() if line.startswith("FOUND")]
    tokens, report = json.loads(line.removeprefix("FOUND"))
    return tokens, report


def test_a_first_start_finds_what_was_compiled_ahead(tmp_path: Path) -> None:
    tokens, first = start(tmp_path / "ahead")
    assert first["ahead"]["why"] == ""
    assert first["ahead"]["failed"] == {}
    assert first["ahead"]["compiled"] == first["ahead"]["foretold"] > 20
    assert first["kernels"]["loaded"] > 10
    # All of it lies in Triton's own folder, whatever torch's compiler would name.
    assert any((tmp_path / "ahead" / ".triton" / "cache").glob("vllm-graft-*"))
    again, second = start(tmp_path / "ahead")
    assert second["ahead"]["why"] == "an earlier start has compiled them"
    assert second["kernels"]["compiled"] == 0
    # Control: where nothing is compiled ahead, the worker compiles one kernel after another.
    alone, third = start(tmp_path / "late", VLLM_GRAFT_COMPILE_PROCESSES="0")
    assert third["ahead"]["foretold"] == 0
    assert third["kernels"]["compiled"] > 2 * first["kernels"]["compiled"]
    assert tokens == again == alone
