"""A target follows its table, and its module's guesses are right as often as was asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.known_acceptance import follow_a_table, guesses, mixtures, successors
from benchmarks.recurrent_steps import SHAPES, TINY
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


def known(shape: str, folder: Path) -> tuple[Path, torch.Tensor]:
    """A small target that follows a table, and the table."""
    tables: list[torch.Tensor] = []
    write, _ = SHAPES[shape]
    write(
        folder, edit=lambda weights: tables.append(follow_a_table(weights, CHANCES)), **TINY[shape]
    )
    return folder, tables[0]


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("form", "shape"),
    [
        pytest.param("chain", "qwen3-next", marks=pytest.mark.nightly),
        ("tree", "qwen3-next"),
        ("tree", "qwen3.5-9b"),
    ],
)
def test_engines_accept_as_asked(form: str, shape: str, tmp_path: Path) -> None:
    """Shares of some 70 first drafts are compared within three deviations of so many."""
    folder, table = known(shape, tmp_path)
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
