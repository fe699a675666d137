"""The targets of `test_true_shapes_gpu.py` at small sizes, and what else that test relies on."""

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.answers.near_ties import Answer, answers, check_near_ties
from tests.support.models import table_drafter
from tests.support.models.window_models import TRUE_SHAPES, TrueShape
from tests.support.watches import synchronisations
from vllm_graft.spec_decode.targets.dense.window import window_of
from vllm_graft.spec_decode.targets.latent.latent_layer import TreeLatents
from vllm_graft.testing import cpu_engine, model_runner, spec_metrics

_RANDOM = random.Random(0)
PROMPTS = [[_RANDOM.randrange(2, 512) for _ in range(length)] for length in (5, 40, 17, 60, 3)]
TOKENS, WINDOW = 10, 16

SMALL: dict[str, dict[str, Any]] = {
    "gpt-oss": {
        "hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_local_experts": 4, "sliding_window": WINDOW,
    },
    "gemma-3": {
        "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 64, "query_pre_attn_scalar": 64,
        "sliding_window": WINDOW,
    },
    "deepseek-v2-lite": {
        "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64,
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    },
}  # fmt: skip

CASES = [
    # The others have tests of their own here: test_window_engine.py, test_latent_engine.py.
    pytest.param(shape, id=shape.name, marks=[] if shape.name == "gemma-3" else pytest.mark.nightly)
    for shape in TRUE_SHAPES
]


@pytest.mark.engine
@pytest.mark.parametrize("shape", CASES)
def test_trees_answer_as_the_target_alone(shape: TrueShape, tmp_path: Path, learn: Any) -> None:
    target = shape.write(tmp_path / "target", **SMALL[shape.name])
    options: dict[str, Any] = {
        "max_model_len": 128, "max_num_seqs": 3, "max_num_batched_tokens": 128,
        "skip_tokenizer_init": True, "dtype": "float32", "disable_log_stats": False,
    }  # fmt: skip
    if not shape.windows:
        options["attention_backend"] = "CPU_MLA"
    with cpu_engine(target, **options) as llm:
        expected = answers(llm, PROMPTS, TOKENS)
    learn(expected)
    options |= table_drafter.table_trees()
    with cpu_engine(target, **options) as llm:
        found = answers(llm, PROMPTS, TOKENS)
        config = model_runner(llm).vllm_config.compilation_config
        layers = list(config.static_forward_context.values())
        metrics = spec_metrics(llm)
    check_near_ties(found, expected, 1e-3, 0.9)
    assert metrics.accepted_tokens > metrics.drafts / 2
    if shape.windows:
        windows = sorted(window_of(layer.impl) for layer in layers if hasattr(layer, "impl"))
        assert windows == [min(size, WINDOW) for size in shape.windows]
    else:
        latent = [getattr(layer, "forward_impl", None) for layer in layers]
        assert any(isinstance(each, TreeLatents) for each in latent)


def test_near_ties_are_told_from_other_differences() -> None:
    expected = [Answer([1, 2, 3], [{1: -0.1}, {2: -0.5, 4: -0.7, 5: -3.0}, {3: -0.1}])]
    check_near_ties([Answer([1, 4, 9], [])], expected, 0.25)
    for other in (5, 6):
        with pytest.raises(AssertionError):
            check_near_ties([Answer([1, other, 9], [])], expected, 0.25)
    # Too little is compared if they part at once.
    with pytest.raises(AssertionError):
        check_near_ties([Answer([1, 4, 9], [])], expected, 0.25, least=0.5)


def test_waits_are_collected_with_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's warnings stand in for a device here."""
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with synchronisations() as places:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert len(places) == 2
    assert all(Path(__file__).name in place for place in places)
    assert modes == ["warn", 0]
