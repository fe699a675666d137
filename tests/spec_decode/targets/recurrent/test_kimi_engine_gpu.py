"""Trees on Kimi Linear on a device: KDA and MLA in one model, graphs, mixed batches, a head.

VLLM's operators for these layers compute in 16 bits. A tree's rows and a decode are rounded
otherwise, so answers may part where two tokens are about equally probable, and nowhere else. States
of KDA are float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.answers.near_ties import answers, check_near_ties, departures
from tests.support.engines.kimi_engines import (
    HIDDEN,
    NEAR,
    PROMPTS,
    TOKENS,
    check_parts,
    engine,
    learn,
    write_target,
)
from tests.support.models.latent_models import draft_shape
from vllm_graft.spec_decode.targets.families import UnchangedState
from vllm_graft.spec_decode.targets.latent.latent_family import LatentFamily
from vllm_graft.spec_decode.targets.recurrent.recurrent_family import RecurrentFamily
from vllm_graft.testing import spec_metrics, write_eagle3

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
    form: str, target: str, plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(target, "TRITON_MLA", trees=False) as llm:
        expected = answers(llm, PROMPTS, TOKENS)
    learn(monkeypatch, plugin, expected)
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


def test_a_head_drafts(
    target: str, plugin: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An EAGLE-3 head brings a layer of a third kind, plain attention."""
    draft = str(write_eagle3(tmp_path / "head", draft_shape(HIDDEN)))
    with engine(target, "TRITON_MLA", trees=False) as llm:
        expected = answers(llm, PROMPTS, TOKENS)
    learn(monkeypatch, plugin, expected)
    with engine(target, "TRITON_MLA", trees=True, draft=draft) as llm:
        check_near_ties(answers(llm, PROMPTS, TOKENS), expected, NEAR)
        check_parts(llm)
        metrics = spec_metrics(llm)
    assert metrics.accepted_tokens > metrics.drafts / 2
