"""A small target's steps are as long as the host's work, so that each launch counts."""

from collections import Counter
from typing import Any

import pytest

from tests.support.engines.pairs import Pair, Request, answer_all
from tests.support.step_work import StepWork, counting
from vllm_graft.testing import model_runner

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

TEXTS = ("pass\n" * 8, "import os, sys\n" * 4)
OURS = {"_rows_kernel", "_walk_kernel", "_compact_kernel", "_slots_kernel", "_learn_kernel"}
INPUTS = Counter(
    ["_gather_block_tables_kernel", "_prepare_pos_seq_lens_kernel", "_post_update_kernel",
     "_combine_sampled_and_draft_tokens_kernel", "_compute_slot_mappings_kernel",
     "_gumbel_sample_kernel"]
)  # fmt: skip
"""What a step of vLLM's without drafts launches, too."""


@pytest.fixture(scope="module")
def steps(pair: Pair) -> list[StepWork]:
    """Steps of two requests at once: of drafts for a while, then of none."""
    options: dict[str, Any] = {"max_num_seqs": 2, "async_scheduling": True}
    tree = {"shape": "auto"}
    lengths = {"prompt_lookup_min": 1, "prompt_lookup_max": 6}
    with pair.engine(
        method="ngram_gpu", nodes=3, topk=2, steps=3, tree=tree, speculative=lengths,
        graphs=[1, 2, 4, 8], **options,
    ) as llm:  # fmt: skip
        tuner = llm.llm_engine.engine_core.engine_core.scheduler.dynamic_sd_lookup.tuner
        begin_step, numbers = tuner.begin_step, iter([max(tuner.allowed(len(TEXTS)))] * 12)

        def chosen(batch: int) -> int:
            begin_step(batch)
            return next(numbers, 0)

        tuner.begin_step = chosen
        asked = [Request(text, {"temperature": 0, "max_tokens": 64}) for text in TEXTS]
        with counting(model_runner(llm)) as seen:
            answer_all(llm, asked)
    return seen


def usual(steps: list[StepWork], *, drafts: bool) -> StepWork:
    """The work of most steps of both requests that verify drafts and draft, or do neither."""
    alike = [
        step
        for step in steps
        if len(step.rows) == len(TEXTS)
        and {bool(step.launches[each]) for each in ("_walk_kernel", "_slots_kernel")} == {drafts}
    ]
    assert len(alike) > 2
    return next(step for step in alike if alike.count(step) > len(alike) / 2)


def test_a_step_of_trees_launches_few_kernels(steps: list[StepWork]) -> None:
    work = usual(steps, drafts=True)
    assert work.rows[0] > 1
    own = {"_rows_kernel", "_walk_kernel", "_compact_kernel", "_slots_kernel"}
    assert work.launches == INPUTS + Counter([*own, "_expand_idx_mapping_kernel"]) + Counter(
        {"replay": 2}
    )
    # Matches, their paths and the choice of nodes are the second graph's.
    assert not work.operators


def test_a_step_of_a_rest_launches_what_one_without_drafts_does(steps: list[StepWork]) -> None:
    work = usual(steps, drafts=False)
    assert work.rows == [1] * len(TEXTS)
    assert work.launches == INPUTS + Counter(["_get_num_sampled_and_rejected_kernel", "replay"])
    assert not work.operators
    assert not OURS & set(work.launches)


def test_the_counter_sees_what_is_launched_besides(steps: list[StepWork]) -> None:
    """Control: a prompt's step has rows of its own, and is no replay of these graphs."""
    prompts = [step for step in steps if max(step.rows, default=0) > 8]
    assert any(step.launches["_prepare_prefill_inputs_kernel"] for step in prompts)
    assert any(step.launches["_rows_kernel"] for step in prompts)
