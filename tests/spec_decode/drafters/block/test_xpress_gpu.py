"""Engines on a device whose draft refines a block, in vLLM's own FULL graphs. From vLLM 0.33 on."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.engines import gpu_blocks
from tests.support.engines.gpu_blocks import GREEDY, SEEDED, share_alike
from tests.support.engines.gpu_engines import exact_engine
from tests.support.engines.pairs import Answer, answer_all, differing
from tests.support.models.block_drafts import write_xpress
from tests.support.models.block_pairs import FROM_LAST
from vllm_graft.testing import spec_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

# Fixtures, which pytest finds by these names.
target = gpu_blocks.target
alone = gpu_blocks.alone
BACKEND = {"attention_backend": "TRITON_ATTN"}
"""Else vLLM chooses a backend for the draft by itself."""


@pytest.fixture(scope="module", autouse=True)
def known() -> None:
    if importlib.util.find_spec("vllm.v1.worker.gpu.spec_decode.xpress") is None:
        pytest.skip("vLLM knows XPress drafts since 0.33")


@pytest.mark.parametrize("error", [0.0, 0.6])
def test_a_chain_is_accepted_as_stock_vllm_s(
    target: Path, alone: list[Answer], tmp_path: Path, error: float
) -> None:
    """Stock's chain, after as many passes as positions, is our best path."""
    draft = write_xpress(
        tmp_path / "draft", from_last=FROM_LAST, error=error, causal=True, passes=8
    )
    spec = {"method": "dflash", "model": str(draft), "num_speculative_tokens": 8, **BACKEND}
    with exact_engine(target, speculative_config=spec) as llm:
        assert differing(answer_all(llm, GREEDY), alone[: len(GREEDY)]) == []
        stock = spec_metrics(llm)
    with exact_engine(
        target,
        draft=str(draft),
        method="dflash",
        nodes=8,
        tree={"topk": 1, "steps": 8},
        speculative=BACKEND,
    ) as llm:
        assert differing(answer_all(llm, GREEDY), alone[: len(GREEDY)]) == []
        ours = spec_metrics(llm)
    assert ours.drafts == stock.drafts
    assert ours.accepted_per_position == stock.accepted_per_position
    # Stock's chain of a draft without an error was accepted in 20 of 22 steps on a GPU.
    if not error:
        assert ours.accepted_per_position[0] > 0.8 * ours.drafts


@pytest.mark.parametrize("topc", [0, 40])
def test_graphs_draft_what_launches_draft(
    target: Path, alone: list[Answer], tmp_path: Path, topc: int
) -> None:
    """Graphs draft so well that as much is accepted as without any, for sampled requests too."""
    draft = write_xpress(tmp_path / "draft", from_last=FROM_LAST, error=0.3, causal=True, topc=topc)
    ranges = {"num_speculative_tokens_per_batch_size": [(1, 2, 24), (3, 8, 7)]}
    found = []
    for eager in (False, True):
        with exact_engine(
            target,
            draft=str(draft),
            method="dflash",
            nodes=24,
            tree={"topk": 4, "steps": 6},
            speculative=BACKEND | ranges,
            enforce_eager=eager,
        ) as llm:
            answers = answer_all(llm, GREEDY)
            metrics = spec_metrics(llm)
            answers += answer_all(llm, SEEDED) + answer_all(llm, SEEDED[:1])
            [info] = llm.collective_rpc("graft_info")
        assert differing(answers, [*alone, alone[len(GREEDY)]]) == []
        counters = info["counters"]["tree"]
        assert (counters["draft_replays"] > 0) is not eager
        assert [each["positions"] for each in counters["blocks"]] == [8, 8]
        found.append(metrics.acceptance_length)
    assert found[0] == pytest.approx(found[1], rel=0.05)
    assert found[0] > 1.3


def test_a_block_that_sees_all_of_itself(target: Path, alone: list[Answer], tmp_path: Path) -> None:
    """XPress is trained so, which takes FLASH_ATTN, and that bfloat16; the head is in FP8.

    A product that rounds otherwise may decide a near tie: so most of the answers' tokens are
    compared, and what is accepted.
    """
    draft = write_xpress(tmp_path / "draft", from_last=FROM_LAST, topc=200)
    with exact_engine(
        target,
        draft=str(draft),
        method="dflash",
        nodes=31,
        tree={"topk": 4, "steps": 8, "head_dtype": "fp8"},
        speculative={"attention_backend": "FLASH_ATTN"},
        dtype="bfloat16",
        attention_backend="FLASH_ATTN",
    ) as llm:
        answers = answer_all(llm, GREEDY)
        metrics = spec_metrics(llm)
        [info] = llm.collective_rpc("graft_info")
    assert share_alike(answers, alone[: len(GREEDY)], 8) > 0.8
    assert metrics.accepted_per_position[0] > 0.8 * metrics.drafts
    assert metrics.accepted_per_position[2] > metrics.drafts / 4
    counters = info["counters"]["tree"]
    assert counters["draft_replays"] > 0
    assert counters["fp8_head_bytes"] > 0
