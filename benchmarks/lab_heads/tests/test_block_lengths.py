"""Trees of a DSpark head without an engine, against plain loops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.lab_heads import __main__ as program
from benchmarks.lab_heads import files
from benchmarks.lab_heads.block_lengths import Blocks
from benchmarks.lab_heads.tests import small_drafters
from benchmarks.pair_models import Llama, Text, write
from benchmarks.tree_lengths import mean_length, read_prompts
from tests.support.shipped_pair import SHIPPED
from vllm_graft.spec_decode.heads.head import SHARPNESS

DEPTH = 3


@pytest.fixture(scope="module")
def target() -> Llama:
    found = Llama(SHIPPED)
    found.aux = list(small_drafters.AUX)
    return found


@pytest.fixture(scope="module")
def text(target: Llama) -> Text:
    with torch.inference_mode():
        return write(target, read_prompts(SHIPPED, 1, 12), 24, 1.0)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("head") / "dspark"
    files.save_head(small_drafters.random_head(SHIPPED / "target", DEPTH), found)
    return found


class NoBias:
    """A head whose positions know the text, so that the token before adds nothing."""

    def markov_head(self, before: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*before.shape, 1)


def perfect(target: Llama, text: Text) -> tuple[Blocks, torch.Tensor]:
    """Blocks that say at each place of the text what the target says; and what it says."""
    with torch.inference_mode():
        truth = target.run(text.tokens[None], [])[0][0]
    starts = torch.arange(text.prompt, len(text.tokens) - DEPTH - 1)
    logits = torch.stack([truth[starts + level] for level in range(DEPTH)], 1)
    head: Any = NoBias()
    return Blocks(head, text, starts, logits), truth


def test_a_perfect_head_is_accepted_with_the_noise_of_the_draws(target: Llama, text: Text) -> None:
    blocks, truth = perfect(target, text)
    # All that is drafted is a chain, or branches from the text's path, in order of likelihood.
    assert min(blocks.grow(4, 1.0).lengths(4 + 16 * (DEPTH - 1))) == DEPTH + 1
    torch.testing.assert_close(blocks.chain(truth, 1.0), torch.ones(len(blocks.starts), DEPTH))
    # Control: the noise of other draws.
    assert text.noise is not None
    other = replace(blocks, text=replace(text, noise=text.noise.roll(1, 0)))
    assert mean_length(other.grow(4, 1.0).lengths(4)) < mean_length(blocks.grow(4, 1.0).lengths(4))


def plain_length(blocks: Blocks, row: int, topk: int, nodes: int) -> int:
    """Grow the tree of one place in plain loops, and follow the text in it."""
    text, start = blocks.text, int(blocks.starts[row])
    assert text.noise is not None
    found: list[tuple[float, tuple[int, ...]]] = []
    frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for level in range(DEPTH):
        children = []
        for score, path in frontier:
            before = torch.tensor([path[-1] if path else int(text.tokens[start])])
            logits = blocks.logits[row, level] + blocks.head.markov_head(before)[0]
            ranked = (logits * SHARPNESS + text.noise[start + level]).log_softmax(-1)
            best = ranked.topk(topk)
            children += [
                (score + value, (*path, token))
                for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            ]
        found += children
        frontier = sorted(children, reverse=True)[:topk]
    kept = {path for _, path in sorted(found, reverse=True)[:nodes]}
    follows = text.tokens[start + 1 :].tolist()
    depth = 0
    while tuple(follows[: depth + 1]) in kept:
        depth += 1
    return depth + 1


def test_trees_are_those_of_plain_loops(target: Llama, text: Text, folder: Path) -> None:
    with torch.inference_mode():
        blocks = Blocks.of(target, files.load_head(folder), text, DEPTH)
        lengths = blocks.grow(3, 1.0).lengths(7)
        wanted = [plain_length(blocks, row, 3, 7) for row in range(len(blocks.starts))]
    assert lengths == wanted
    assert len(set(lengths)) > 1


def test_the_command_prints_a_row_for_each_tree_and_chain(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--shapes", "1,1,1", "3,2,5", "--chains", "2", "--temperature", "0", "1"]
    few = ["--texts", "2", "--prompt", "12", "--tokens", "20"]
    assert program.main(["lengths", str(SHIPPED), str(folder.parent), *given, *few]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.strip().splitlines()[2:]]
    names = [row[0].strip("| ") for row in rows]
    assert names == ["1, 1, 1", "3, 2, 5", "chain of 2"]
    assert rows[2][1] == "-"
    assert 1 <= float(rows[0][2].strip("| ")) <= 2
    assert float(rows[1][2].strip("| ")) >= float(rows[0][2].strip("| "))


def test_blocks_are_as_long_as_asked(target: Llama, text: Text, folder: Path) -> None:
    head = files.load_head(folder)
    with torch.inference_mode():
        short, whole = (Blocks.of(target, head, text, depth) for depth in (2, DEPTH))
    assert head.depth == DEPTH
    assert (short.logits.shape[1], whole.logits.shape[1]) == (2, DEPTH)
    # Positions see those behind them.
    assert not torch.allclose(short.logits[: len(whole.logits), 0], whole.logits[:, 0], atol=1e-3)
