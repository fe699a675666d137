"""How many layers keep K/V and how many a state, by the names of each kind of model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.kimi_models import write_kimi_linear
from tests.support.models.recurrent_models import (
    write_falcon_h1,
    write_granite_hybrid,
    write_nemotron_h,
    write_qwen3_next,
)
from vllm_graft.plan.layer_counts import LayerCounts
from vllm_graft.testing.models.llama import write_llama


class OneOfTwo:
    """What is read of vLLM's ``ParallelConfig``, for the first of two pipeline ranks."""

    pipeline_parallel_size = 2
    tensor_parallel_size = 1
    rank = 0


def counts(target: Path, parallel: Any = None) -> LayerCounts:
    from vllm.config import ParallelConfig
    from vllm.engine.arg_utils import EngineArgs

    model = EngineArgs(str(target), skip_tokenizer_init=True).create_model_config()
    return LayerCounts.of(model, parallel or ParallelConfig())


@pytest.mark.parametrize(
    ("write", "expected", "of_first"),
    [
        (write_llama, (4, 0), (2, 0)),
        (write_qwen3_next, (2, 2), (1, 1)),
        (write_kimi_linear, (2, 2), (1, 1)),
        # Two layers are MLPs alone.
        (write_nemotron_h, (2, 2), (1, 1)),
        (write_granite_hybrid, (2, 2), (1, 1)),
        # Attention and Mamba-2 side by side.
        (write_falcon_h1, (2, 2), (1, 1)),
    ],
)
def test_layers_are_counted(
    write: Callable[[Path], Path],
    expected: tuple[int, int],
    of_first: tuple[int, int],
    tmp_path: Path,
) -> None:
    target = write(tmp_path / "target")
    assert counts(target) == expected
    assert counts(target, OneOfTwo()) == of_first
