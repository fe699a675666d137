"""Targets with MLA: trees answer as the target alone does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import table_drafter
from tests.support.latent_models import draft_shape, write_deepseek
from vllm_graft.spec_decode.attention.latent_layer import TreeLatents
from vllm_graft.spec_decode.targets.latent import LatentFamily
from vllm_graft.spec_decode.targets.unchanged import UnchangedState
from vllm_graft.testing import cpu_engine, greedy, model_runner, spec_metrics, write_eagle3

pytestmark = pytest.mark.engine

PROMPTS = [[7, 3, 9, 30, 2], [5] * 40, list(range(1, 60))]
TOKENS = 24


def grafted(llm: Any) -> int:
    layers = model_runner(llm).vllm_config.compilation_config.static_forward_context.values()
    return sum(isinstance(getattr(layer, "forward_impl", None), TreeLatents) for layer in layers)


def test_trees_answer_as_the_target_alone(
    tmp_path: Path, plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts from a table of the target's tokens are accepted far more than a random head's."""
    target = write_deepseek(tmp_path / "target", heads=2)
    draft = write_eagle3(tmp_path / "draft", draft_shape())
    options: dict[str, Any] = {
        "max_model_len": 128,
        # The third request waits for one of the others: its prompt meets trees.
        "max_num_seqs": 2,
        "skip_tokenizer_init": True,
    }
    with cpu_engine(target, attention_backend="CPU_MLA", **options) as llm:
        expected = greedy(llm, PROMPTS, TOKENS)
    monkeypatch.setattr(table_drafter, "NEXT", table_drafter.learned(expected))
    plugin(table_drafter)
    options["speculative_config"] = {
        "method": "eagle3",
        "model": str(draft),
        "num_speculative_tokens": 7,
    }
    options["additional_config"] = {"graft": {"tree": {"topk": 2, "steps": 4, "drafter": "table"}}}
    with cpu_engine(target, attention_backend="CPU_MLA", **options) as llm:
        assert greedy(llm, PROMPTS, TOKENS) == expected
        metrics = spec_metrics(llm)
        assert grafted(llm) == 4
        assert model_runner(llm).speculator.context.counters.mixed_launches
        [choice] = model_runner(llm).speculator.attention_choices
        assert choice.why == "there is one kernel for the latents of MLA"
    assert metrics.accepted_tokens > metrics.drafts
    # The backend and the kernels of a GPU, interpreted, in FULL graphs.
    with cpu_engine(target, graphs=[8, 16], **options) as llm:
        assert greedy(llm, PROMPTS, TOKENS) == expected
        assert grafted(llm) == 4
        assert model_runner(llm).speculator.context.counters.tree_replays
    # Negative control: where what is accepted stays in its slots, tokens differ.
    monkeypatch.setattr(LatentFamily, "state", lambda *_: UnchangedState())
    with cpu_engine(target, attention_backend="CPU_MLA", **options) as llm:
        assert greedy(llm, PROMPTS, TOKENS) != expected
