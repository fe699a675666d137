"""Drafts whose tokens are no tokens of the target."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.drafters.tree_drafting import TreeDrafting
from vllm_graft.spec_decode.heads import hot_tokens
from vllm_graft.spec_decode.heads.hot_tokens import check_draft_tokens

VOCAB = 100


def draft(offsets: list[int] | None) -> SimpleNamespace:
    tensor = None if offsets is None else torch.tensor(offsets)
    return SimpleNamespace(draft_id_to_target_id=tensor)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(hot_tokens, "warning_once", found.append)
    return found


@pytest.mark.parametrize(
    ("offsets", "names"),
    [
        ([0, 99, 0], "leads from 1 of the draft's 3 tokens .*, token 1 to 100, .* 0 to 99"),
        ([0, 5, -3], "token 2 to -1"),
        ([9000, 9000, 1], "leads from 2 of the draft's 3 tokens .*, token 0 to 9000"),
    ],
)
def test_ids_out_of_the_vocabulary_are_refused(offsets: list[int], names: str) -> None:
    with pytest.raises(ConfigError, match=names) as refused:
        check_draft_tokens(draft(offsets), VOCAB, "/some/head")
    assert str(refused.value).startswith("--speculative-config.model: d2t of '/some/head'")
    assert "\n" not in str(refused.value)


def test_ids_within_the_vocabulary_are_fine(said: list[str]) -> None:
    check_draft_tokens(draft([0, 98, 97]), VOCAB, "head")
    check_draft_tokens(draft(None), VOCAB, "head")
    check_draft_tokens(draft([0] * VOCAB), VOCAB, "head")
    check_draft_tokens(SimpleNamespace(), VOCAB, "head")
    assert not said


def test_a_small_vocabulary_without_d2t_is_told(said: list[str]) -> None:
    check_draft_tokens(draft([0, 0, 0]), VOCAB, "head")
    (line,) = said
    assert "drafts 3 of the target's 100 tokens and has no d2t" in line


def test_a_drafter_checks_its_draft() -> None:
    """Before it makes anything of the draft's head."""
    drafter: Any = SimpleNamespace(
        model=draft([9000, 0]),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB)),
        draft_model_config=SimpleNamespace(model="/some/head"),
    )
    with pytest.raises(ConfigError, match="d2t of '/some/head' leads from 1"):
        TreeDrafting.make_head(drafter)
