"""Trees on Kimi Linear on a device, in FULL graphs and in broken ones."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.answers.near_ties import Answer, answers, check_near_ties, departures
from tests.support.engines.kimi_layers import (
    HIDDEN,
    NEAR,
    PROMPTS,
    TOKENS,
    check_parts,
    engine,
    prompt_of,
    write_target,
)
from tests.support.engines.pairs import counter
from tests.support.models.latent_models import draft_shape
from vllm_graft.spec_decode.targets.families import UnchangedState
from vllm_graft.spec_decode.targets.latent.latent_layer import LatentFamily
from vllm_graft.spec_decode.targets.recurrent.recurrent_family import RecurrentFamily
from vllm_graft.testing import model_runner, spec_metrics, write_eagle3

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("untuned"),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_target(tmp_path_factory.mktemp("kimi"))


@pytest.mark.parametrize("form", ["inputs", "states"])
def test_trees_answer_as_the_target_alone(
    form: str, target: str, learn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(target, "TRITON_MLA", trees=False) as llm:
        expected = answers(llm, PROMPTS, TOKENS)
    learn(expected)
    with engine(target, "TRITON_MLA", trees=True, form=form) as llm:
        found = answers(llm, PROMPTS, TOKENS)
        check_parts(llm, form)
        metrics = spec_metrics(llm)
    check_near_ties(found, expected, NEAR)
    assert metrics.accepted_tokens > metrics.drafts / 2
    # Negative controls: what is accepted stays where it was written, in one family or the other.
    for family in (RecurrentFamily, LatentFamily):
        with monkeypatch.context() as patch:
            patch.setattr(family, "state", lambda *_: UnchangedState())
            with engine(target, "TRITON_MLA", trees=True, form=form) as llm:
                spoilt = departures(answers(llm, PROMPTS, TOKENS), expected)
        print(f"{family.__name__} moves nothing: {spoilt}")
        assert any(each.gap >= NEAR for each in spoilt)


def test_a_head_drafts(target: str, learn: Any, tmp_path: Path) -> None:
    """An EAGLE-3 head brings a layer of a third kind, plain attention."""
    draft = write_eagle3(tmp_path / "head", draft_shape(HIDDEN))
    with engine(target, "TRITON_MLA", trees=False) as llm:
        expected = answers(llm, PROMPTS, TOKENS)
    learn(expected)
    with engine(target, "TRITON_MLA", trees=True, draft=draft) as llm:
        check_near_ties(answers(llm, PROMPTS, TOKENS), expected, NEAR)
        check_parts(llm)
        metrics = spec_metrics(llm)
    assert metrics.accepted_tokens > metrics.drafts / 2


@pytest.mark.usefixtures("flash_attention_3")
def test_broken_graphs_and_prefixes(target: str, learn: Any) -> None:
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
    learn([*expected, plain])
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
