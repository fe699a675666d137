"""A request with one token left to compute gets the rows of a full tree, if limits leave room.

The trees are of n-grams alone: a draft of hidden states makes vLLM compute a cached prompt's last
block again. Both defects are vLLM's, and a chain has them, too.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engines.pairs import Pair

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

ROWS = 8
BLOCK = 32
PROMPT = list(range(5, 5 + 2 * BLOCK + 1))
"""Two blocks, which are cached, and a token that is left."""

SPECULATIVE = {"method": "ngram", "num_speculative_tokens": ROWS - 1, "prompt_lookup_max": 3}


def _ask(llm: Any, name: str, prompt: list[int], tokens: int = 2) -> None:
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), params)


def _answers(llm: Any, most: int = 60) -> dict[str, list[int]]:
    """Tokens of what is answered within so many steps."""
    engine, found = llm.llm_engine, {}
    for _ in range(most):
        if not engine.has_unfinished_requests():
            break
        found |= {each.request_id: list(each.outputs[0].token_ids) for each in engine.step()}
    return found


def test_the_least_limits_serve_and_lesser_ones_do_not(pair: Pair) -> None:
    with pair.engine(
        speculative_config=SPECULATIVE,
        additional_config={"graft": {"tree": {"topk": 2, "steps": 4}}},
        enable_prefix_caching=True,
        block_size=BLOCK,
        max_num_seqs=2,
        max_num_batched_tokens=128,
        long_prefill_token_threshold=ROWS,
    ) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        _ask(llm, "first", PROMPT)
        expected = _answers(llm)["first"]
        scheduler.max_num_scheduled_tokens = ROWS
        _ask(llm, "cached", PROMPT)
        assert _answers(llm) == {"cached": expected}

        scheduler.max_num_scheduled_tokens = ROWS - 1
        _ask(llm, "waiting", PROMPT)
        assert _answers(llm) == {}
        assert scheduler.get_request_counts() == (0, 1)
        scheduler.max_num_scheduled_tokens = ROWS
        assert _answers(llm) == {"waiting": expected}

        # Beside a request that runs, a prompt of one token is enough.
        scheduler.max_num_scheduled_tokens = 2 * ROWS
        for threshold, works in ((ROWS, True), (ROWS - 1, False)):
            scheduler.scheduler_config.long_prefill_token_threshold = threshold
            _ask(llm, f"running {threshold}", PROMPT[:3], tokens=4)
            llm.llm_engine.step()
            _ask(llm, f"short {threshold}", PROMPT[:1])
            if works:
                assert len(_answers(llm)) == 2
                continue
            with pytest.raises(AssertionError) as caught:
                _answers(llm)
            assert caught.traceback[-1].path.name == "scheduler.py"
        del scheduler
