"""Two ranks on a CPU: tensor-parallel ones draft the same trees, data-parallel ones of one size."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import with_noise, write_changed
from tests.support.engines import rank_answers
from tests.support.engines import rank_families as families
from tests.support.engines.cache_engines import transfer
from tests.support.engines.pairs import Answer, Pair, Request, answer_all
from tests.support.engines.rank_answers import Questions
from tests.support.engines.rank_families import Family
from tests.support.models.mtp_targets import write_glm4_moe
from vllm_graft.bench.common.told_lengths import DRAFTS, SCHEDULER
from vllm_graft.learn.publications import WEIGHTS, Facts, Publications, digest
from vllm_graft.spec_decode.trees.tree import CHECK_RANKS

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

ASKED = 2


@pytest.fixture(autouse=True)
def trees_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all ranks compare their trees after each step."""
    monkeypatch.setenv(CHECK_RANKS, "1")


def two_ranks(pair: Pair, tree: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {
        "model": pair.target,
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 32,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "disable_log_stats": False,
        "speculative_config": {
            "method": "eagle3",
            "model": pair.draft,
            "num_speculative_tokens": 7,
        },
        "additional_config": {"graft": {"tree": tree}},
        **options,
    }


def compared_trees(found: rank_answers.RankAnswers) -> int:
    """How often both ranks have compared their trees."""
    first, second = (rank["counters"]["tree"]["rank_checks"] for rank in found.ranks)
    assert first == second
    return int(first)


def test_two_ranks_answer_as_one(
    pair: Pair, samples: list[Request], expected: list[Answer], tmp_path: Path
) -> None:
    """The second round finds its prompts in the host's memory.

    Levels draft from hot tokens, whose rows each rank gets from all: nearly all of the draft's
    tokens, so that they hold enough of any text.
    """
    tree = {"topk": 3, "steps": 4, "hot_tokens": 1000, "head_dtype": "fp8"}
    engine = two_ranks(pair, tree, kv_transfer_config=transfer(load="async"))
    questions = Questions(engine, samples[:ASKED], rounds=2)
    found = rank_answers.ask(tmp_path, questions, cuda=False, hurried=True)
    assert found.rounds == [expected[:ASKED]] * 2
    cached = [sum(answer.cached for answer in answers) for answers in found.rounds]
    assert cached[0] < cached[1]
    first, second = (rank["counters"]["tree"]["hot_tokens"] for rank in found.ranks)
    assert first == second
    assert first["choices"] > 4
    assert first["steps"] > 4
    assert found.metrics["vllm:graft_hicache_hit_tokens_host"] > 0
    drafts = found.metrics["vllm:spec_decode_num_drafts"]
    assert found.metrics["vllm:spec_decode_num_accepted_tokens"] > drafts
    assert compared_trees(found) >= drafts / ASKED


@pytest.mark.nightly
def test_two_ranks_swap_a_head_between_the_same_steps(
    pair: Pair, samples: list[Request], expected: list[Answer], tmp_path: Path
) -> None:
    """Trees of both are compared after each step, and ranks with other heads would differ."""
    base = write_changed(Path(pair.draft), tmp_path / "base", with_noise)
    folder = tmp_path / "published"
    facts = Facts(digest(base / WEIGHTS), 0, 1.0, 2.0, 60.0)
    Publications(folder).publish([Path(pair.draft) / WEIGHTS], facts)
    tree = {"topk": 3, "steps": 4, "hot_tokens": 1000, "head_dtype": "fp8"}
    engine = two_ranks(pair, tree)
    engine["speculative_config"]["model"] = str(base)
    engine["additional_config"]["graft"]["learn"] = {"follow": str(folder), "follow_trees": 100}
    asked = Questions(engine, samples[:ASKED], rounds=12)
    found = rank_answers.ask(tmp_path, asked, cuda=False, hurried=True)
    assert found.rounds == [expected[:ASKED]] * 12
    assert found.metrics["vllm:graft_learn_head"] == 1
    assert found.metrics["vllm:graft_learn_head_swaps"] == 1
    before, after = (
        found.metrics[f"vllm:graft_learn_head_yield{each}"] for each in ("_before", "")
    )
    assert after > before + 0.1
    assert compared_trees(found) >= found.metrics["vllm:spec_decode_num_drafts"] / ASKED


@pytest.mark.nightly
def test_a_chain_of_stock_s_is_told_its_length_on_two_ranks(pair: Pair, tmp_path: Path) -> None:
    """The scheduler of `bench trees` is in another process than the workers."""
    speculative = {
        "method": "eagle3",
        "model": pair.draft,
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 8, 2]],
    }
    engine = two_ranks(pair, {}, speculative_config=speculative, scheduler_cls=SCHEDULER)
    engine["additional_config"] = {}
    asked = {"temperature": 0.0, "max_tokens": 8, "extra_args": {DRAFTS: 2}}
    questions = Questions(engine, [Request(pair.prompts[0], asked)])
    found = rank_answers.ask(tmp_path, questions, cuda=False).metrics
    tokens, steps = (found[f"vllm:spec_decode_num_{what}"] for what in ("draft_tokens", "drafts"))
    assert tokens == 2 * steps > 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (families.experts, "auto"),
        (families.dspark, "fixed"),
        (families.windows, "fixed"),
        (families.sinks, "fixed"),
        (families.grammars, "auto"),
        (families.ngrams, "fixed"),
        (families.ngrams_alone, "auto"),
        (families.draft_model, "fixed"),
        (families.draft_model, "auto"),
    ],
)
def test_families_agree_on_two_ranks(
    make: Callable[[Path, Pair], Family], shape: str, pair: Pair, tmp_path: Path
) -> None:
    family = make(tmp_path / "models", pair)
    family.tree["shape"] = shape
    with Pair(str(family.target), "", []).engine(**family.options) as llm:
        expected = answer_all(llm, family.requests[:ASKED])
    engine = two_ranks(pair, {}, **family.options, **family.asked) | {"model": str(family.target)}
    found = rank_answers.ask(tmp_path, Questions(engine, family.predict(expected)), cuda=False)
    assert found.rounds == [expected]
    assert compared_trees(found) > 0
    if family.accepts:
        assert found.metrics["vllm:spec_decode_num_accepted_tokens"] > 0


LENGTH = 64
"""The model's length, which some answers reach."""


def of_each_rank() -> list[list[Request]]:
    """Requests that end at different times: one rank is left with dummy batches for long."""
    long, short = {"max_tokens": LENGTH, "seed": 7}, {"max_tokens": 8, "temperature": 0}
    middle = {"max_tokens": 30, "temperature": 0}
    texts = ["one two three", "a b c d e f", "def main(argv):", "x = 1"]
    first = [Request(text, params) for text, params in zip(texts, (long, middle, long, short))]
    return [first, [Request("The fox", short)]]


@pytest.mark.parametrize(
    ("shape", "table"),
    [("auto", None), pytest.param("fixed", [[1, 1, 7], [2, 8, 3]], marks=pytest.mark.nightly)],
)
def test_data_parallel_ranks_of_experts_draft_one_number(
    shape: str, table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of target and module are those of both ranks. There is K/V for two requests.

    Ranks that drafted different numbers would wait for each other until the time is up.
    """
    monkeypatch.delenv(CHECK_RANKS)
    folder = str(write_glm4_moe(tmp_path / "target", from_states=0.2))
    target, requests = Pair(folder, folder, []), of_each_rank()
    with target.engine(max_model_len=LENGTH) as llm:
        expected = [answer_all(llm, each) for each in requests]
    speculative = {"method": "mtp", "model": folder, "num_speculative_tokens": 7}
    engine = two_ranks(
        target,
        {"topk": 3, "steps": 3, "shape": shape},
        tensor_parallel_size=1,
        distributed_executor_backend="uni",
        max_model_len=LENGTH,
        max_num_batched_tokens=LENGTH,
        num_gpu_blocks_override=6,
        speculative_config=speculative | {"num_speculative_tokens_per_batch_size": table},
    )
    questions = [Questions(engine, each) for each in requests]
    found = rank_answers.ask_replicas(tmp_path, questions, cuda=False)
    assert [each.rounds for each in found] == [[each] for each in expected]
    drafted, kept = (
        [each.metrics[f"vllm:spec_decode_num_{name}"] for each in found]
        for name in ("drafts", "accepted_tokens")
    )
    assert min(drafted) > 0
    assert kept[0] > 0
    assert found[0].metrics["vllm:num_preemptions"] > 0
