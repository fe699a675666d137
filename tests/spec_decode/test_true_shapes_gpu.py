"""Targets in the layer shapes of published models, in bfloat16, on a Hopper GPU.

Trees in FULL graphs answer as the target alone, but for near ties, and wait nowhere for the device
where the target alone does not. The mixtures of experts need vLLM's MoE kernels.
"""

import random
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.answers.near_ties import answers, check_near_ties
from tests.support.engines.gpu_engines import exact_engine
from tests.support.models.table_drafter import table_trees
from tests.support.models.window_models import TRUE_SHAPES, TrueShape
from tests.support.watches import synchronisations
from vllm_graft.spec_decode.targets.dense import layer as grafted
from vllm_graft.spec_decode.targets.dense.window import window_of
from vllm_graft.spec_decode.targets.latent.latent_layer import TreeLatents
from vllm_graft.testing import model_runner, spec_metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("flash_attention_3"),
]

NODES, TOKENS = 7, 24
_RANDOM = random.Random(0)
PROMPTS = [
    [_RANDOM.randrange(2, 512) for _ in range(length)]
    for length in (5, 40, 300, 1200, 3, 1400, 1100, 130, 1300, 8, 1500, 70)
]
"""More than run at once, so that prompts meet trees; some are longer than a step's tokens, and than
the windows."""


def engine(shape: TrueShape, target: Path, *, trees: bool) -> AbstractContextManager[Any]:
    """An engine without drafts, or with trees from a table of the target's tokens."""
    return exact_engine(
        target,
        drafts=NODES if trees else 0,
        dtype="bfloat16",
        attention_backend=shape.backend,
        block_size=shape.block_size,
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
        **(table_trees() if trees else {}),
    )


def waits(llm: Any) -> list[str]:
    """Places at which the host waits for the device while prompts and decodes are served."""
    with synchronisations() as places:
        answers(llm, PROMPTS[:3], 8)
    print(f"waits: {sorted(set(places))}, {len(places)} in all")
    return places


def check_parts(shape: TrueShape, llm: Any) -> None:
    """Trees ran, in graphs and beside prompts, on layers with the windows of the model."""
    runner = model_runner(llm)
    layers = runner.vllm_config.compilation_config.static_forward_context.values()
    if shape.windows:
        found = [window_of(layer.impl) for layer in layers if hasattr(layer, "impl")]
        assert sorted(found) == shape.windows
    else:
        latent = [getattr(layer, "forward_impl", None) for layer in layers]
        assert any(isinstance(each, TreeLatents) for each in latent)
    counters = runner.speculator.context.counters
    print(f"counters: {counters}, {spec_metrics(llm)}")
    assert counters.tree_replays > 0
    assert counters.mixed_launches > 0


@pytest.mark.parametrize("shape", TRUE_SHAPES, ids=lambda each: each.name)
def test_trees_answer_as_the_target_alone(
    shape: TrueShape, tmp_path: Path, learn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = shape.write(tmp_path / "target")
    with engine(shape, target, trees=False) as llm:
        expected = answers(llm, PROMPTS, TOKENS)
        alone = waits(llm)
    learn(expected)
    with engine(shape, target, trees=True) as llm:
        found = answers(llm, PROMPTS, TOKENS)
        check_parts(shape, llm)
        metrics = spec_metrics(llm)
        assert set(waits(llm)) <= set(alone)
    check_near_ties(found, expected, shape.near)
    assert metrics.accepted_tokens > metrics.drafts / 2
    if shape.windows:
        # Negative control: rows of trees see every key.
        monkeypatch.setattr(grafted, "window_of", lambda impl: 0)
        with engine(shape, target, trees=True) as llm:
            spoilt = answers(llm, PROMPTS, TOKENS)
        with pytest.raises(AssertionError):
            check_near_ties(spoilt, expected, shape.near)


def test_a_wait_is_seen() -> None:
    """Negative control of the places: an `item()` is one, and a replay is none."""
    numbers = torch.ones(4, device="cuda")
    with synchronisations() as places:
        numbers.sum().item()
    [place] = places
    assert Path(__file__).name in place
    with synchronisations() as places:
        numbers.sum()
    assert places == []
