"""Trees of drafts beside the host KV cache: what a tree wrote is loaded, and the tokens hold."""

from __future__ import annotations

from typing import Any

import pytest
from hicache_engines import generate, metrics, transfer
from pair_engines import Pair

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = 90


def _turns(llm: Any, prompts: list[Any], load: bool) -> tuple[list[list[int]], list[list[int]]]:
    """A long answer to each prompt, then an answer to all that."""
    first = llm.generate(prompts, _greedy(TOKENS), use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in first]
    if load:
        # With async scheduling vLLM frees the last blocks a step late.
        while not llm.reset_prefix_cache():
            llm.llm_engine.step()
    again = [
        {"prompt_token_ids": [*output.prompt_token_ids, *answer]}
        for output, answer in zip(first, tokens)
    ]
    second, cached = generate(llm, again, 24)
    if load:
        # The blocks of the first answers, which trees have written, are among them.
        assert all(count > len(output.prompt_token_ids) for count, output in zip(cached, first))
    return tokens, second


def _greedy(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def test_blocks_that_trees_have_written() -> None:
    pair = Pair.load()
    prompts = pair.prompts[:2]
    from vllm_graft.testing import cpu_engine

    with cpu_engine(pair.target) as llm:
        expected = _turns(llm, prompts, load=False)
    options = transfer(load="async")
    with pair.engine(nodes=15, async_scheduling=True, kv_transfer_config=options) as llm:
        assert _turns(llm, prompts, load=True) == expected
        assert metrics(llm)["hit_tokens_host"] > 2 * 32
