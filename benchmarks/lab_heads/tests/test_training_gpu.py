"""Training on a GPU, where targets are in bfloat16 and drafters under autocast."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.lab_heads import learning, making, target_states
from benchmarks.real_pair import generation
from benchmarks.real_pair.texts import Text
from tests.support.shipped_pair import SHIPPED

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("kind", ["mtp", "dspark"])
def test_drafters_learn_on_a_gpu(kind: str, tmp_path: Path) -> None:
    device = torch.device("cuda")
    made = making.MAKERS[kind](SHIPPED, device, making.Sizes(depth=3, rank=32))
    turns = [(list(range(2 + i, 18 + i)), (0.0, 1.0)[i % 2]) for i in range(64)]
    texts: list[Text] = generation.generate(
        made.target.model, turns, seconds=60, max_tokens=48, held_out=False, rows=64
    )
    assert all(text.tokens.device.type == "cpu" for text in texts)
    given = target_states.reads(made.target, texts, 2048, 64, 0, 0)
    first, given = learning.beginning(given, 2)
    made.lesson.begin(first)
    before = learning.acceptance(made.lesson, made.target, texts, 2048, 64)
    losses = learning.learn(made.lesson, given, learning.Run(device, 60, 100, 3e-3))
    after = learning.acceptance(made.lesson, made.target, texts, 2048, 64)
    assert sum(losses[-10:]) < sum(losses[:10])
    assert after.length > before.length + 0.2
    made.save(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
