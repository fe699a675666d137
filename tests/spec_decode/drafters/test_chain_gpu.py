"""Graphs of a standalone draft model on a device."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.support.answers.dashboard import without_data
from tests.support.answers.metrics_page import metrics_page
from tests.support.checkpoints import write_likeness
from vllm_graft.metrics.server_info import total
from vllm_graft.testing import TinyShape, model_runner, running, write_llama

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
        # Tests of other processes come and go on the card, so memory is not profiled.
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=2**28,
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
