"""Drafts of other kinds on a device."""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.support.answers.dashboard import without_data
from tests.support.answers.metrics_page import metrics_page
from tests.support.answers.text_requests import TEXTS, both_kinds
from tests.support.checkpoints import write_likeness
from tests.support.engines.gpu_engines import exact_engine
from tests.support.engines.pairs import Request, answer_all, differing
from tests.support.engines.shipped_pair import SHIPPED
from tests.support.models.mtp_targets import write_glm4_moe, write_mimo
from tests.support.models.window_models import write_gemma4, write_gemma4_assistant
from tests.support.watches import proposed
from vllm_graft.metrics.exposition import total
from vllm_graft.spec_decode.tuning.tuner import NodeTuner
from vllm_graft.testing import TinyShape, model_runner, running, spec_metrics, write_llama

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

STEPS = 5
SIZES = [1, 2, 4, 8]
SHAPE = TinyShape(hidden_size=256, head_dim=64, num_heads=4, num_kv_heads=2, intermediate_size=512)
ALIKE = 0.97
"""Least share of equal drafts: split sums may decide differently where two logits nearly tie."""


def engine(
    folder: Path, backend: str, dtype: str, compiled: bool
) -> contextlib.AbstractContextManager[Any]:
    return running(
        folder / "target",
        speculative_config={
            "method": "draft_model",
            "model": str(folder / "draft"),
            "num_speculative_tokens": STEPS,
        },
        attention_backend=backend,
        compilation_config={
            **({} if compiled else {"mode": 0}),
            "cudagraph_mode": "FULL_DECODE_ONLY",
            # `SIZES` are requests of the draft's loop. 48 rows are eight requests of the target,
            # six rows each, and 56 rows eight of the draft's first pass, seven rows each.
            "cudagraph_capture_sizes": [*SIZES, 24, 28, 48, 56],
        },
        dtype=dtype,
        max_model_len=512,
        max_num_seqs=12,
        gpu_memory_utilization=0.3,
        enable_prefix_caching=False,
        disable_log_stats=False,
        additional_config={"graft": {"draft": {}}},
    )


@pytest.fixture(
    scope="module",
    params=[("TRITON_ATTN", "float32", False), ("FLASH_ATTN", "bfloat16", True)],
    ids=lambda param: param[0],
)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder: Path = tmp_path_factory.mktemp("models")
    write_likeness(write_llama(folder / "target", SHAPE), folder / "draft")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("HF_HUB_OFFLINE", "1")
        with engine(folder, *request.param) as built:
            yield built


def ask(llm: Any, batch: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(5 + i, 40 + 9 * i))} for i in range(batch)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def speculator(llm: Any) -> Any:
    return model_runner(llm).speculator


PASSES = {"extend": "_prefill", "loop": "_multi_step_decode"}


def alike(llm: Any, batch: int, which: str, patch: pytest.MonkeyPatch) -> float:
    """Return the fraction of a pass's drafts that replays and launches share; 0 without replays."""
    from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

    chain, name = speculator(llm), PASSES[which]
    columns = slice(0, 1) if which == "extend" else slice(1, None)
    fractions: list[float] = []

    def both(step: Any, *args: Any) -> None:
        drafts = chain.draft_tokens[: step.num_reqs, columns]
        getattr(StandaloneARSpeculator, name)(chain, step, *args)
        launched = drafts.clone()
        # The replay has to write the drafts again.
        drafts.zero_()
        before = chain.report()
        getattr(type(chain), name)(chain, step, *args)
        counter = "extend_replays" if which == "extend" else "replays"
        if chain.report()[counter] > before[counter]:
            fractions.append(float((launched == drafts).float().mean()))

    patch.setattr(chain, name, both)
    ask(llm, batch)
    return sum(fractions) / len(fractions) if fractions else 0.0


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_a_replay_drafts_what_launches_draft(
    llm: Any, batch: int, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert alike(llm, batch, which, monkeypatch) >= ALIKE


@pytest.mark.parametrize("which", PASSES)
def test_stale_inputs_draft_something_else(
    llm: Any, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the comparison finds inputs that are not refreshed."""
    inputs = "extend_inputs" if which == "extend" else "chain_inputs"
    monkeypatch.setattr(getattr(speculator(llm), inputs), "load", lambda *args: None)
    assert alike(llm, 3, which, monkeypatch) < ALIKE


def test_sizes_and_counters(llm: Any) -> None:
    ask(llm, 12)
    report = speculator(llm).report()
    assert report["graphs"] == [8, 4, 2, 1]
    assert report["extend_graphs"] == [8, 4, 2, 1]
    # Twelve requests are more than any graph holds.
    assert report["too_large"] > 0
    assert report["extend_launched"] > 0
    page = metrics_page()
    assert without_data(page, "", "draft") == []
    assert total(page, "vllm:graft_draft_loop_replays_total") == report["replays"]
    assert total(page, "vllm:graft_draft_graphs", of="loop") == 4


def test_answers_do_not_depend_on_graphs(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts decide how fast tokens come; the target decides which."""
    if llm.llm_engine.vllm_config.model_config.dtype != torch.float32:
        pytest.skip("a batch's shape decides near ties of the target in 16 bits")
    answers = ask(llm, 4)
    monkeypatch.setattr(speculator(llm), "chain_runner", None)
    monkeypatch.setattr(speculator(llm), "extend_runner", None)
    assert ask(llm, 4) == answers


PROMPTS = [[7, 3, 9, 30, 2], [5] * 40, list(range(1, 90)), [11]]
TOKENS, GEMMA4_STEPS = 24, 4
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_batched_tokens": 96}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma4")
    write_gemma4(folder / "target")
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    with exact_engine(folder / "target", **OPTIONS) as llm:
        return both_kinds(llm, PROMPTS, TOKENS)


@pytest.mark.parametrize("ordered", [False, True])
def test_trees_answer_as_the_target_alone(
    folder: Path, alone: list[list[int]], tmp_path: Path, ordered: bool
) -> None:
    draft = write_gemma4_assistant(tmp_path / "assistant", ordered=ordered)
    tree = {"topk": 3, "steps": GEMMA4_STEPS}
    with exact_engine(
        folder / "target", draft=str(draft), method="mtp", nodes=9, tree=tree, **OPTIONS
    ) as llm:
        assert both_kinds(llm, PROMPTS, TOKENS) == alone
        [info] = llm.collective_rpc("graft_info")
    counters = info["counters"]["tree"]
    assert counters["draft_replays"] > 0
    assert counters["tree_replays"] > 0


def test_a_chain_drafts_what_stock_vllm_drafts(folder: Path, tmp_path: Path) -> None:
    draft = str(write_gemma4_assistant(tmp_path / "assistant"))
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    prompts = [{"prompt_token_ids": each} for each in PROMPTS]
    spec = {"method": "mtp", "model": draft, "num_speculative_tokens": GEMMA4_STEPS}
    with (
        exact_engine(folder / "target", speculative_config=spec, **OPTIONS) as llm,
        proposed(llm) as stock,
    ):
        llm.generate(prompts, params, use_tqdm=False)
    tree = {"topk": 1, "steps": GEMMA4_STEPS}
    with exact_engine(
        folder / "target", draft=draft, method="mtp", nodes=GEMMA4_STEPS, tree=tree, **OPTIONS
    ) as llm:
        with proposed(llm) as ours:
            llm.generate(prompts, params, use_tqdm=False)
        assert type(model_runner(llm).speculator).__name__ == "Gemma4Trees"
    assert ours == stock
    assert len(stock) > TOKENS / 2


def test_an_engine_in_full_graphs() -> None:
    """The target is its own draft, so that nearly all drafts are right, seeded ones as well."""
    requests = [
        Request(text, {"max_tokens": 48, **kind})
        for text in ("def main(argv):\n", "import os, sys\nimport", "class Tree:\n    def")
        for kind in ({"temperature": 0}, {"seed": 7, "temperature": 0.6})
    ]
    target = SHIPPED / "target"
    with exact_engine(target) as llm:
        expected = answer_all(llm, requests)
    tree = {"topk": 4, "steps": 5}
    with exact_engine(target, draft=str(target), nodes=15, tree=tree, method="draft_model") as llm:
        # Graphs of the first pass have 17 rows per request, and here 128 rows at most.
        found = answer_all(llm, requests[:4]) + answer_all(llm, requests[4:])
        assert differing(found, expected) == []
        (info,) = llm.collective_rpc("graft_info")
        assert spec_metrics(llm).acceptance_length > 4.5
    counted = info["counters"]["tree"]
    assert counted["draft_replays"] > 0
    assert counted["first_pass_replays"] > counted["first_pass_launches"] > 0
    assert counted["tree_replays"] > 0


REQUESTS = [
    Request(text, {"max_tokens": 40, **kind})
    for text in TEXTS[:3]
    for kind in ({"temperature": 0}, {"seed": 7})
]
TREE = {"topk": 4, "steps": 4, "graph_runner": "verify"}


@pytest.mark.parametrize("write", [write_mimo, write_glm4_moe])
def test_a_perfect_module(write: Callable[[Path], Path], tmp_path: Path) -> None:
    """Hot tokens hold half of what is not emitted, too: the head is cut, behind its norm."""
    target = write(tmp_path / "target")
    with exact_engine(target) as llm:
        expected = answer_all(llm, REQUESTS)
    emitted = set(itertools.chain.from_iterable(each.tokens[0] for each in expected))
    hot = tmp_path / "hot.json"
    hot.write_text(json.dumps(sorted(emitted | set(range(0, 512, 2)))))
    tree = {**TREE, "hot_tokens": str(hot)}
    with exact_engine(target, tree=tree, nodes=15, method="mtp") as llm:
        assert differing(answer_all(llm, REQUESTS), expected) == []
        metrics = spec_metrics(llm)
        [info] = llm.collective_rpc("graft_info")
    # The first step of a short prompt is all that a perfect module may get wrong.
    assert metrics.accepted_per_position[0] > 0.9 * metrics.drafts
    assert metrics.accepted_per_position[2] > metrics.drafts / 2
    counters = info["counters"]["tree"]
    assert counters["draft_replays"] > 0
    assert counters["tree_replays"] > 0
    assert counters["draft_graphs_differing"] == {15: []}
    assert counters["draft_graphs_verified"][15]


def test_a_module_with_experts_has_graphs_of_narrow_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every number of the ladder takes its turn, chains of several levels among them."""
    target = write_glm4_moe(tmp_path / "target")
    with exact_engine(target) as llm:
        expected = answer_all(llm, REQUESTS)
    numbers = [1, 2, 3, 6, 4, 14, 15]
    turns = itertools.cycle(numbers)
    monkeypatch.setattr(NodeTuner, "begin_step", lambda tuner, batch: next(turns))
    tree = {**TREE, "shape": "auto"}
    with exact_engine(target, tree=tree, nodes=15, method="mtp") as llm:
        tuner = llm.llm_engine.engine_core.engine_core.scheduler.dynamic_sd_lookup.tuner
        assert set(tuner.costs) == {0, *numbers}
        assert differing(answer_all(llm, REQUESTS), expected) == []
        [info] = llm.collective_rpc("graft_info")
    counters = info["counters"]["tree"]
    widths = {each["num_nodes"]: each["topk"] for each in counters["shapes"]}
    assert widths == {1: 1, 2: 1, 3: 1, 4: 1, 6: 2, 14: 3, 15: 3}
    assert counters["draft_replays"] > 0
    assert not any(counters["draft_graphs_differing"].values())
    assert sum(map(bool, counters["draft_graphs_verified"].values())) > 4


def test_a_norm_and_a_head_in_fp8(tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs products of FP8 numbers")
    target = write_glm4_moe(tmp_path / "target")
    tree: dict[str, Any] = {"topk": 4, "steps": 4, "head_dtype": "fp8"}
    with exact_engine(target, tree=tree, nodes=15, method="mtp", dtype="bfloat16") as llm:
        answer_all(llm, REQUESTS)
        metrics = spec_metrics(llm)
        head = model_runner(llm).speculator.head
        assert head.fp8.weight.dtype == torch.float8_e4m3fn
        del head
        [info] = llm.collective_rpc("graft_info")
    assert metrics.accepted_per_position[0] > 0.8 * metrics.drafts
    assert info["counters"]["tree"]["fp8_head_bytes"] > 0
    assert info["counters"]["tree"]["draft_replays"] > 0
