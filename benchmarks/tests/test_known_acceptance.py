"""A target follows its table, and its module's guesses are right as often as was asked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.known_acceptance import (
    APART,
    HotText,
    follow_a_table,
    guesses,
    mixtures,
    successors,
)
from benchmarks.recurrent_steps import SHAPES, TINY
from vllm_graft.spec_decode.heads import hot_vocabulary
from vllm_graft.spec_decode.heads.hot_rows import PlainRows
from vllm_graft.testing import cpu_engine, greedy, spec_metrics
from vllm_graft.testing.recurrent_layers import interpreted

CHANCES = [0.6, 0.2, 0.1]
PROMPTS: list[Any] = [
    [7, 3, 9],
    [5] * 4,
    [11, 23],
    [130, 17, 200, 44],
    [61],
    [99, 301],
    [404],
    [256, 2],
]
TOKENS = 20


def test_tokens_follow_each_other_in_a_ring() -> None:
    table = successors(50, seed=3)
    token, seen = int(table[0]), []
    for _ in range(48):
        seen.append(token)
        token = int(table[token])
    assert token == seen[0]
    assert sorted(seen) == list(range(2, 50))


def walk(table: torch.Tensor, token: int, count: int) -> list[int]:
    """So many tokens that follow `token`."""
    found = [int(table[token])]
    while len(found) < count:
        found.append(int(table[found[-1]]))
    return found


HOT = HotText(tokens=1000, share=0.9, apart=200)
LENGTH, HELD = 800, 720
"""Tokens of its text, and the hot ones among them."""


def test_a_text_has_the_share_of_hot_tokens_that_is_asked() -> None:
    table = successors(4000, seed=3, hot=HOT)
    text = walk(table, 0, LENGTH)
    assert len(set(text)) == LENGTH
    assert int(table[text[-1]]) == text[0]
    assert sum(token < HOT.tokens for token in text) == HELD
    assert min(text) >= HOT.apart
    # They are not in one part of it: three deviations of a quarter that is drawn at random.
    quarters = [sum(token < HOT.tokens for token in text[at : at + 200]) for at in (0, 200, 400)]
    assert all(abs(count - 180) < 3 * (200 * 0.9 * 0.1 * 0.75) ** 0.5 for count in quarters)
    # Prompts that end with neighbours are followed by parts of it that lie side by side.
    assert [int(table[token]) for token in range(4)] == [text[APART * place] for place in range(4)]
    assert torch.equal(successors(4000, seed=3, hot=HOT), table)
    assert not torch.equal(successors(4000, seed=4, hot=HOT), table)


@pytest.mark.parametrize(
    "hot",
    [
        HotText(1000, 1.1),
        HotText(1000, -0.1),
        HotText(1000, 0.5, apart=999),
        HotText(1000, 0.5, apart=1),
        HotText(5000, 1.0),
        # There are 3000 others.
        HotText(3000, 0.5),
    ],
)
def test_impossible_shares_are_refused(hot: HotText) -> None:
    with pytest.raises(ValueError, match=f"share .* {hot.share}"):
        successors(4000, seed=0, hot=hot)


@pytest.mark.parametrize(("passes", "held"), [(1, HELD), (2, HELD + LENGTH)])
def test_a_learned_vocabulary_holds_the_share_until_the_text_comes_again(
    passes: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hot_vocabulary, "PERIOD", 5)
    monkeypatch.setattr(hot_vocabulary, "LATE", 1)
    rows = PlainRows(SimpleNamespace(weight=torch.zeros(4000, 1), tp_size=1), HOT.tokens)
    hot = hot_vocabulary.HotVocabulary(HOT.tokens, torch.arange(4000), 4000, rows)
    found = 0
    for token in walk(successors(4000, seed=3, hot=HOT), 0, LENGTH * passes):
        found += int((hot.target_ids == token).any())
        hot.emitted[token] += 1
        hot.step()
    assert hot.choices == LENGTH * passes / 5
    assert found == held


def made_up(vocabulary: int, hidden: int) -> dict[str, torch.Tensor]:
    """The weights that are changed, of a target without layers."""
    shapes = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "lm_head.weight": (vocabulary, hidden),
        "mtp.fc.weight": (hidden, 2 * hidden),
    }
    return {name: torch.empty(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("hot", [None, HOT])
def test_heads_find_successors_and_guesses(hot: HotText | None) -> None:
    weights = made_up(4000, 1024)
    table = follow_a_table(weights, CHANCES, seed=3, hot=hot)
    assert torch.equal(table, successors(4000, 3, hot))
    seen, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    assert torch.equal((seen[2:] @ head.T).argmax(1), table[2:])
    module = torch.cat([seen, torch.zeros_like(seen)], 1) @ weights["mtp.fc.weight"].T
    found = (module[2:] @ head.T).topk(len(CHANCES)).indices
    assert torch.isin(found, table).all()
    # Tokens of the text are as many trials; those outside look like some of them.
    text = torch.isin(torch.arange(2, 4000), table)
    right = (found == table[2:, None])[text].double().mean(0)
    expected = torch.tensor(CHANCES, dtype=torch.float64)
    deviation = (expected * (1 - expected) / text.sum()).sqrt()
    assert ((right - expected).abs() < 4 * deviation).all()


def test_guesses_are_right_as_often_as_asked() -> None:
    found = guesses(20000, CHANCES, seed=4)
    right = (found == torch.arange(20000)[:, None]).double().mean(0)
    torch.testing.assert_close(right, torch.tensor(CHANCES, dtype=torch.float64), atol=0.02, rtol=0)
    # A token has no guess twice.
    ordered = found.sort(1)[0]
    assert (ordered[:, 1:] > ordered[:, :-1]).all()


@pytest.mark.parametrize("chances", [[0.6, 0.6], [0.2, 0.4], [0.5, 0.0]])
def test_impossible_chances_are_refused(chances: list[float]) -> None:
    with pytest.raises(ValueError, match="positive and fall"):
        guesses(100, chances, seed=0)


def test_a_module_is_as_sure_of_its_guesses_as_they_are_right() -> None:
    size = 1024
    directions = torch.randn(5000, size, generator=torch.Generator().manual_seed(1))
    directions *= size**0.5 / directions.norm(dim=1, keepdim=True)
    chosen = guesses(5000, CHANCES, seed=4)
    found = mixtures(directions, chosen, CHANCES)
    torch.testing.assert_close(found.norm(dim=1), torch.full((5000,), size**0.5))
    # Logits as the module's: of unit length, times the deviation of other tokens' logits.
    logits = found @ directions.T * (1.2 / size**0.5)
    best = logits.softmax(1).topk(4)
    assert torch.equal(best.indices[:, :3], chosen)
    expected = torch.tensor(CHANCES) / sum(CHANCES)
    torch.testing.assert_close(best.values[:, :3], expected.expand(5000, -1), atol=0.02, rtol=0.02)


def known(shape: str, folder: Path, hot: HotText | None = None) -> tuple[Path, torch.Tensor]:
    """A small target that follows a table, and the table."""
    tables: list[torch.Tensor] = []

    def edit(weights: dict[str, torch.Tensor]) -> None:
        tables.append(follow_a_table(weights, CHANCES, hot=hot))

    write, _ = SHAPES[shape]
    write(folder, edit=edit, **TINY[shape])
    return folder, tables[0]


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("form", "shape", "hot"),
    [
        pytest.param("chain", "qwen3-next", None, marks=pytest.mark.nightly),
        ("tree", "qwen3-next", None),
        ("tree", "qwen3.5-9b", None),
        pytest.param("tree", "qwen3.5-9b", HotText(400, 0.9, 100), marks=pytest.mark.nightly),
    ],
)
def test_engines_accept_as_asked(
    form: str, shape: str, hot: HotText | None, tmp_path: Path
) -> None:
    """Shares of some 70 first drafts are compared within three deviations of so many."""
    folder, table = known(shape, tmp_path, hot)
    options: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 8, "skip_tokenizer_init": True}
    options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 3}
    if form == "tree":
        tree = {"topk": 2, "steps": 2, "recurrent": True}
        options["additional_config"] = {"graft": {"tree": tree}}
    with interpreted(), cpu_engine(folder, **options) as llm:
        found = greedy(llm, PROMPTS, TOKENS)
        metrics = spec_metrics(llm)
    for prompt, answer in zip(PROMPTS, found):
        line = [prompt[-1], *answer]
        assert table[line[:-1]].tolist() == answer
    first = metrics.accepted_per_position[0] / metrics.drafts
    expected = CHANCES[0] if form == "chain" else CHANCES[0] + CHANCES[1]
    print(
        f"{form}: first drafts {first:.3f} of {metrics.drafts}, length {metrics.acceptance_length}"
    )
    assert abs(first - expected) < 3 * (expected * (1 - expected) / metrics.drafts) ** 0.5
