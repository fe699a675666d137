"""Trees from the assistant of a Gemma 4, on a device, with levels in graphs; and a chain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.answers.both_kinds import both_kinds
from tests.support.engines.gpu_engines import exact_engine
from tests.support.models.window_models import write_gemma4, write_gemma4_assistant
from tests.support.watches.proposed import proposed
from vllm_graft.testing import model_runner

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

PROMPTS = [[7, 3, 9, 30, 2], [5] * 40, list(range(1, 90)), [11]]
TOKENS, STEPS = 24, 4
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
    tree = {"topk": 3, "steps": STEPS}
    with exact_engine(
        folder / "target", draft=str(draft), method="mtp", nodes=9, tree=tree, **OPTIONS
    ) as llm:
        assert both_kinds(llm, PROMPTS, TOKENS) == alone
        [info] = llm.collective_rpc("graft_info")
    counters = info["counters"]["tree"]
    assert counters["draft_replays"] > 0
    assert counters["tree_replays"] > 0


def test_a_chain_drafts_what_stock_vllm_drafts(folder: Path, tmp_path: Path) -> None:
    from vllm import SamplingParams

    draft = str(write_gemma4_assistant(tmp_path / "assistant"))
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    prompts = [{"prompt_token_ids": each} for each in PROMPTS]
    spec = {"method": "mtp", "model": draft, "num_speculative_tokens": STEPS}
    with (
        exact_engine(folder / "target", speculative_config=spec, **OPTIONS) as llm,
        proposed(llm) as stock,
    ):
        llm.generate(prompts, params, use_tqdm=False)
    tree = {"topk": 1, "steps": STEPS}
    with exact_engine(
        folder / "target", draft=draft, method="mtp", nodes=STEPS, tree=tree, **OPTIONS
    ) as llm:
        with proposed(llm) as ours:
            llm.generate(prompts, params, use_tqdm=False)
        assert type(model_runner(llm).speculator).__name__ == "Gemma4Trees"
    assert ours == stock
    assert len(stock) > TOKENS / 2
