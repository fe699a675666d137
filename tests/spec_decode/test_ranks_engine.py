"""Two tensor-parallel ranks on a CPU draft the same trees, and answer as one rank does."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import rank_answers
from tests.support.engines.cache_engines import transfer
from tests.support.engines.pairs import Answer, Pair, Request
from vllm_graft.bench.common.told_lengths import DRAFTS, SCHEDULER
from vllm_graft.spec_decode.verification.rank_check import CHECK_RANKS

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

ASKED = 2


@pytest.fixture(autouse=True)
def trees_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all ranks compare their trees after each step."""
    monkeypatch.setenv(CHECK_RANKS, "1")


def two_ranks(pair: Pair, tree: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return the arguments of an engine of two ranks."""
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
    questions = {
        "engine": two_ranks(pair, tree, kv_transfer_config=transfer(load="async")),
        "requests": [{"prompt": s.prompt, "params": s.params} for s in samples[:ASKED]],
        "rounds": 2,
    }
    found = rank_answers.ask(tmp_path, questions, cuda=False, hurried=True)
    answers = [answer.tokens[0] for answer in expected[:ASKED]]
    assert found.rounds == [answers, answers]
    assert sum(found.cached[0]) < sum(found.cached[1])
    first, second = (rank["counters"]["tree"]["hot_tokens"] for rank in found.ranks)
    assert first == second
    assert first["choices"] > 4
    assert first["steps"] > 4
    assert found.metrics["vllm:graft_hicache_hit_tokens_host"] > 0
    drafts = found.metrics["vllm:spec_decode_num_drafts"]
    assert found.metrics["vllm:spec_decode_num_accepted_tokens"] > drafts
    assert compared_trees(found) >= drafts / ASKED


def test_stocks_chains_are_told_their_length_on_two_ranks(pair: Pair, tmp_path: Path) -> None:
    """The scheduler of `bench trees` is in another process than the workers."""
    drafted = {}
    for number, length in enumerate((2, 3)):
        speculative = {
            "method": "eagle3",
            "model": pair.draft,
            "num_speculative_tokens": 3,
            "num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 8, 2]],
        }
        params = {"temperature": 0.0, "max_tokens": 8, "extra_args": {DRAFTS: length}}
        questions = {
            "engine": two_ranks(pair, {}, speculative_config=speculative)
            | {"additional_config": {}, "scheduler_cls": SCHEDULER},
            "requests": [{"prompt": pair.prompts[0], "params": params}],
            "rounds": 1,
        }
        folder = tmp_path / str(number)
        folder.mkdir()
        found = rank_answers.ask(folder, questions, cuda=False).metrics
        tokens, steps = (f"vllm:spec_decode_num_{what}" for what in ("draft_tokens", "drafts"))
        drafted[length] = found[tokens] / found[steps]
    assert drafted == {2: 2.0, 3: 3.0}


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["ngram_gpu", "draft_model"])
@pytest.mark.parametrize("shape", ["fixed", "auto"])
def test_other_drafters_agree_on_two_ranks(
    method: str,
    shape: str,
    pair: Pair,
    samples: list[Request],
    expected: list[Answer],
    tmp_path: Path,
) -> None:
    """The target drafts for itself where a draft model is asked for."""
    speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        speculative |= {"model": pair.target}
    else:
        speculative |= {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
    tree = {"topk": 3, "nodes": 7, "shape": shape}
    questions = {
        "engine": two_ranks(pair, tree, speculative_config=speculative),
        "requests": [{"prompt": s.prompt, "params": s.params} for s in samples[:ASKED]],
        "rounds": 1,
    }
    found = rank_answers.ask(tmp_path, questions, cuda=False)
    assert found.rounds == [[answer.tokens[0] for answer in expected[:ASKED]]]
    assert compared_trees(found) > 0
    assert found.metrics["vllm:spec_decode_num_accepted_tokens"] > 0
