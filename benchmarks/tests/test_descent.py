"""Training runs that several ranks share."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from itertools import repeat
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.descent import descend
from benchmarks.real_pair.__main__ import parser


@dataclass(frozen=True)
class Pace:
    device: torch.device
    seconds: float = 600.0
    steps: int = 5
    rate: float = 0.1
    warm_up: float = 0.1
    seed: int = 3


def trained(given: list[Tensor], seed: int = 0) -> tuple[Tensor, int]:
    """The weights of a model that learned from the same rows again and again, and its steps."""
    torch.manual_seed(seed)
    model = nn.Linear(3, 1, bias=False)

    def loss(rows: Tensor) -> Tensor:
        found: Tensor = (model(rows) - 1).square().mean()
        return found

    losses = descend(model, repeat(torch.cat(given)), loss, Pace(torch.device("cpu")))
    return model.weight.detach(), len(losses)


def rows(rank: int) -> Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(rank))


def one_rank(rank: int, store: str, found: Queue[Any]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    # The second rank begins with other weights, which the first one's replace.
    weights, steps = trained([rows(rank)], seed=rank)
    found.put((rank, weights.tolist(), steps))
    dist.destroy_process_group()


def test_ranks_learn_what_one_learns_from_all_rows(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    found: Queue[Any] = context.Queue()
    ranks = [
        context.Process(target=one_rank, args=(rank, str(tmp_path / "store"), found))
        for rank in range(2)
    ]
    for each in ranks:
        each.start()
    both = sorted(found.get(timeout=120) for _ in ranks)
    for each in ranks:
        each.join()
    alone, steps = trained([rows(0), rows(1)])
    assert both[0][1] == both[1][1]
    assert both[0][2] == both[1][2] == steps == Pace.steps
    torch.testing.assert_close(torch.tensor(both[0][1]), alone)
    # One that learned from half of the rows is another.
    assert not torch.allclose(trained([rows(0)])[0], alone, atol=1e-3)


def test_a_part_of_the_questions() -> None:
    assert parser().parse_args(["answers", "work", "--part", "2/3"]).part == (2, 3)
    for bad in ("3/3", "-1/3", "1", "a/b"):
        with pytest.raises(SystemExit):
            parser().parse_args(["answers", "work", f"--part={bad}"])
