"""Training runs that several ranks share."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import repeat
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.real_pair.descent import Run, descend

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

STEPS = 5


def trained(given: list[Tensor], seed: int = 0) -> tuple[Tensor, int]:
    """The weights of a model that learned from the same rows again and again, and its steps."""
    torch.manual_seed(seed)
    model = nn.Linear(3, 1, bias=False)

    def loss(rows: Tensor) -> Tensor:
        found: Tensor = (model(rows) - 1).square().mean()
        return found

    run = Run(torch.device("cpu"), 600.0, steps=STEPS, rate=0.1, warm_up=0.1, seed=3)
    losses = descend(model, repeat(torch.cat(given)), loss, run)
    return model.weight.detach(), len(losses)


def rows(rank: int) -> Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(rank))


def one_rank(rank: int, folder: Path) -> None:
    """What one of two processes does: it writes its weights and its steps."""
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    # The second rank begins with other weights, which the first one's replace.
    weights, steps = trained([rows(rank)], seed=rank)
    (folder / str(rank)).write_text(json.dumps([weights.tolist(), steps]))
    dist.destroy_process_group()


def test_ranks_learn_what_one_learns_from_all_rows(tmp_path: Path) -> None:
    path = [each for each in sys.path if each] + [str(ROOT)]
    ranks = []
    for rank in range(2):
        code = (
            f"import sys; sys.path[:] = {path!r}; from pathlib import Path; "
            f"from benchmarks.tests.test_real_pair_descent import one_rank; "
            f"one_rank({rank}, Path({str(tmp_path)!r}))"
        )
        ranks.append(subprocess.Popen([sys.executable, "-c", code]))
    assert [each.wait(timeout=120) for each in ranks] == [0, 0]
    both = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    alone, steps = trained([rows(0), rows(1)])
    assert both[0] == both[1]
    assert both[0][1] == steps == STEPS
    torch.testing.assert_close(torch.tensor(both[0][0]), alone)
    # One that learned from half of the rows is another.
    assert not torch.allclose(trained([rows(0)])[0], alone, atol=1e-3)
