"""Trees on Kimi Linear on a device, in the graphs that vLLM makes unasked, with prefixes.

The test has a file of its own, as no engine of its process may have captured graphs before.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.answers.near_ties import Answer, answers, check_near_ties, departures
from tests.support.engines.kimi_engines import (
    NEAR,
    PROMPTS,
    TOKENS,
    check_parts,
    engine,
    learn,
    prompt_of,
    write_target,
)
from tests.support.engines.pairs import counter
from vllm_graft.testing import model_runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("untuned"),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_target(tmp_path_factory.mktemp("kimi"))


@pytest.mark.usefixtures("flash_attention_3")
def test_broken_graphs_and_prefixes(
    target: str, plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs that vLLM makes unasked, which our passes interrupt; states kept for prefixes.

    An answer passes the ends of blocks, where its state moves on, and becomes a prompt later.
    """
    # An engine that follows one with graphs can't capture these: torch has lost their pool by then.
    plain_options = {"graphs": "NONE", "enable_prefix_caching": True}
    with engine(target, "FLASH_ATTN_MLA", trees=False, **plain_options) as llm:
        expected = answers(llm, PROMPTS, TOKENS)
        block = model_runner(llm).vllm_config.cache_config.block_size
        # A state per node has a longer window, so that blocks of the next engine are longer.
        question, tokens = prompt_of(2 * block - 40), 2 * block
        [plain] = answers(llm, [question], tokens)
    learn(monkeypatch, plugin, [*expected, plain])
    more = {"graphs": "FULL_AND_PIECEWISE", "enable_prefix_caching": True}
    with engine(target, "FLASH_ATTN_MLA", trees=True, **more) as llm:
        config = model_runner(llm).vllm_config
        block = config.cache_config.block_size
        assert config.cache_config.mamba_cache_mode == "align"
        assert config.compilation_config.cudagraph_mode.name == "FULL_AND_PIECEWISE"
        assert len(question) < 2 * block < 3 * block <= len(question) + tokens - 8
        check_near_ties(answers(llm, PROMPTS, TOKENS), expected, NEAR)
        check_parts(llm)
        [first] = answers(llm, [question], tokens)
        before = counter(llm, "vllm:prefix_cache_hits")
        # VLLM keeps the states that a prompt leaves at ends of blocks, not those of an answer: the
        # first of these finds the question's alone, the second one more.
        for _ in range(2):
            [again] = answers(llm, [question + first.tokens[:-8]], 8)
        assert counter(llm, "vllm:prefix_cache_hits") >= before + 2 * block
    rest = Answer(first.tokens[-8:], first.best[-8:])
    parted = departures([first, again], [plain, rest])
    print(f"blocks of {block}: {parted}")
    assert all(each.gap < NEAR for each in parted), parted
