"""Trees from the assistant of a Gemma 4, whose layers read K/V of the target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.answers.both_kinds import both_kinds
from tests.support.models.window_models import BLOCK, write_gemma4, write_gemma4_assistant
from tests.support.watches.proposed import proposed
from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.drafters.gemma4 import Gemma4Trees
from vllm_graft.testing import cpu_engine, model_runner

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PROMPTS = [[7, 3, 9, 30, 2], [5] * 40, list(range(1, 90))]
"""The last one is longer than a window, and comes in two chunks."""

TOKENS, STEPS = 14, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma4")
    write_gemma4(folder / "target")
    write_gemma4_assistant(folder / "assistant")
    return folder


@contextmanager
def engine(
    folder: Path, tokens: int = 0, tree: dict[str, Any] | None = None, **more: Any
) -> Iterator[Any]:
    options: dict[str, Any] = {
        "max_model_len": 256, "block_size": BLOCK, "skip_tokenizer_init": True,
        "max_num_batched_tokens": 64, "max_num_seqs": 4,
    }  # fmt: skip
    if tokens:
        options["speculative_config"] = {
            "method": "mtp", "model": str(folder / "assistant"), "num_speculative_tokens": tokens,
        }  # fmt: skip
    if tree is not None:
        options["additional_config"] = {"graft": {"tree": tree}}
    with cpu_engine(folder / "target", **options, **more) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    with engine(folder) as llm:
        return both_kinds(llm, PROMPTS, TOKENS)


def test_a_chain_drafts_what_stock_vllm_drafts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy drafts of stock's chain are the best path of ours, token by token."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    prompts = [{"prompt_token_ids": each} for each in PROMPTS]

    def served(tree: dict[str, Any] | None) -> list[list[list[int]]]:
        with engine(folder, STEPS, tree, attention="triton") as llm, proposed(llm) as found:
            llm.generate(prompts, params, use_tqdm=False)
            assert isinstance(model_runner(llm).speculator, Gemma4Trees) is (tree is not None)
        return found

    stock, chain = served(None), {"topk": 1, "steps": STEPS}
    assert len(stock) > TOKENS / 2
    assert served(chain) == stock
    # Control: levels at positions of their own, as drafts with K/V have them.
    monkeypatch.setattr(Gemma4Trees, "advance_draft_positions", True)
    assert served(chain) != stock


def test_a_chain_on_the_cpu_s_own_attention_is_refused(folder: Path) -> None:
    """Its target keeps K/V in a layout that the assistant's layers would read wrongly."""
    with (
        pytest.raises(ConfigError, match="topk is 1, but the attention backend CPU_ATTN keeps"),
        engine(folder, STEPS, {"topk": 1, "steps": STEPS}),
    ):
        pass


def test_trees_answer_as_the_target_alone(folder: Path, alone: list[list[int]]) -> None:
    with engine(folder, 9, {"topk": 3, "steps": STEPS}) as llm:
        assert both_kinds(llm, PROMPTS, TOKENS) == alone
        runner = model_runner(llm)
        assert isinstance(runner.speculator, Gemma4Trees)
        assert runner.speculator.context.counters.tree_launches
        # Its layers keep nothing of a tree.
        assert runner.speculator.growth_bytes == 0


@pytest.mark.nightly
@pytest.mark.parametrize("ordered", [False, True])
def test_graphs_draft_what_launches_draft(
    folder: Path, alone: list[list[int]], tmp_path: Path, ordered: bool
) -> None:
    """An assistant of a small Gemma computes logits of the tokens near a state alone."""
    write_gemma4_assistant(tmp_path / "assistant", ordered=ordered)
    (tmp_path / "target").symlink_to(folder / "target")
    steps = []
    for graphs in ([1, 2, 4, 8, 10, 20, 40], None):
        more: dict[str, Any] = {"attention": "triton"} | ({"graphs": graphs} if graphs else {})
        with engine(tmp_path, 9, {"topk": 3, "steps": STEPS}, **more) as llm:
            with proposed(llm) as found:
                assert both_kinds(llm, PROMPTS, TOKENS) == alone
            [info] = llm.collective_rpc("graft_info")
        assert (info["counters"]["tree"]["draft_replays"] > 0) is bool(graphs)
        steps.append(found)
    assert steps[0] == steps[1]
    assert len(steps[0]) > TOKENS / 2
