"""The captured loop on a device: each replay against vLLM's loop, launched on the same state."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_graft.testing import TinyShape, write_llama
from vllm_graft.testing.models import write_likeness

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

STEPS = 5
SIZES = [1, 2, 4, 8]
SHAPE = TinyShape(hidden_size=256, head_dim=64, num_heads=4, num_kv_heads=2, intermediate_size=512)
ALIKE = 0.97
"""Share of equal drafts: where two logits are next to equal, split sums may decide otherwise."""


@contextlib.contextmanager
def engine(folder: Path, backend: str, dtype: str, compiled: bool) -> Iterator[Any]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        str(folder / "target"),
        speculative_config={
            "method": "draft_model",
            "model": str(folder / "draft"),
            "num_speculative_tokens": STEPS,
        },
        attention_backend=backend,
        compilation_config={
            **({} if compiled else {"mode": 0}),
            "cudagraph_mode": "FULL_DECODE_ONLY",
            # Requests of the draft; 48 is eight requests of the target.
            "cudagraph_capture_sizes": [*SIZES, 6, 12, 24, 48],
        },
        dtype=dtype,
        max_model_len=512,
        max_num_seqs=12,
        gpu_memory_utilization=0.3,
        enable_prefix_caching=False,
        disable_log_stats=False,
        additional_config={"graft": {"draft": {}}},
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
        del llm
        gc.collect()
        torch.cuda.empty_cache()


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
        with engine(folder, *request.param) as running:
            yield running


def ask(llm: Any, batch: int) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(5 + i, 40 + 9 * i))} for i in range(batch)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def speculator(llm: Any) -> Any:
    from vllm_graft.testing import model_runner

    return model_runner(llm).speculator


def alike(llm: Any, batch: int, patch: pytest.MonkeyPatch) -> float:
    """Share of drafts that a replay and the launched loop have in common."""
    from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

    chain = speculator(llm)
    shares: list[torch.Tensor] = []

    def both(step: Any, rejected: Any, num_reqs: int, *args: Any) -> None:
        StandaloneARSpeculator._multi_step_decode(chain, step, rejected, num_reqs, *args)
        launched = chain.draft_tokens[:num_reqs, 1:].clone()
        # What the loop wrote must be written again.
        chain.draft_tokens[:num_reqs, 1:] = 0
        type(chain)._multi_step_decode(chain, step, rejected, num_reqs, *args)
        shares.append((launched == chain.draft_tokens[:num_reqs, 1:]).float().mean())

    patch.setattr(chain, "_multi_step_decode", both)
    ask(llm, batch)
    return float(torch.stack(shares).mean())


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_a_replay_drafts_what_the_loop_drafts(
    llm: Any, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = speculator(llm).counters.replays
    assert alike(llm, batch, monkeypatch) >= ALIKE
    assert speculator(llm).counters.replays > before


def test_stale_lengths_draft_something_else(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(speculator(llm).chain_inputs, "load", lambda *args: None)
    assert alike(llm, 3, monkeypatch) < ALIKE


def test_sizes_and_counters(llm: Any) -> None:
    ask(llm, 12)
    report = speculator(llm).report()
    # 6 requests have a size too, 12 as well: those are at most max_num_seqs.
    assert report["graphs"] == [12, 8, 6, 4, 2, 1]
    assert report["replays"] > 0
    assert report["uncaptured"] >= 0


def test_answers_do_not_depend_on_graphs(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts decide how fast tokens come; the target decides which."""
    if llm.llm_engine.vllm_config.model_config.dtype != torch.float32:
        pytest.skip("a batch's shape decides near ties of the target in 16 bits")
    answers = ask(llm, 4)
    monkeypatch.setattr(speculator(llm), "chain_runner", None)
    assert ask(llm, 4) == answers
