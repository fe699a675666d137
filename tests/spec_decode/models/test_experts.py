"""Which targets and drafts are mixtures of experts, told by their configurations."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.models.drafts import DENSE_DRAFTS, draft_has_experts, step_has_experts
from vllm_graft.spec_decode.tree_part import TREES
from vllm_graft.spec_decode.tuning.scheduling import _levels, tree_policy
from vllm_graft.spec_decode.tuning.shapes import dynamic, for_blocks, for_experts, whole

AUTO = TreeConfig(shape="auto", topk=4, steps=7)


def config(method: str, *, target: bool, draft: bool, name: str = "Some", nodes: int = 15) -> Any:
    """Make a configuration whose target and draft have experts or not."""
    model = SimpleNamespace(is_moe=target, architectures=["SomeTarget"])
    speculative = SimpleNamespace(
        method=method,
        draft_model_config=SimpleNamespace(is_moe=draft, architectures=[name]),
        target_model_config=model,
        num_speculative_tokens=nodes,
        num_speculative_tokens_per_batch_size=None,
    )
    return SimpleNamespace(
        model_config=model,
        speculative_config=speculative,
        scheduler_config=SimpleNamespace(max_num_seqs=256, max_num_scheduled_tokens=1024),
    )


CASES = [
    # method, draft's architecture, experts in its configuration, whether it has experts.
    ("mtp", "Qwen3NextMTP", True, True),
    ("mtp", "MiMoMTPModel", False, False),
    ("mtp", "ErnieMTPModel", True, False),
    ("eagle", "EagleDeepSeekMTPModel", True, True),
    ("eagle", "EagleLlamaForCausalLM", False, False),
    ("eagle", "EagleLlama4ForCausalLM", True, False),
    ("eagle3", "Eagle3DeepseekV2ForCausalLM", True, False),
    ("draft_model", "Qwen3MoeForCausalLM", True, True),
    ("draft_model", "Qwen3ForCausalLM", False, False),
    ("dspark", "Qwen3DSparkModel", True, False),
    # Without a draft model vLLM has the target's configuration in its place.
    ("ngram", "Qwen3MoeForCausalLM", True, False),
]


@pytest.mark.parametrize(("method", "name", "counted", "expected"), CASES)
def test_drafts(method: str, name: str, counted: bool, expected: bool) -> None:
    # The draft's own configuration decides, not the target's.
    for target in (True, False):
        found = config(method, target=target, draft=counted, name=name)
        assert draft_has_experts(AUTO, found.speculative_config) is expected
        assert step_has_experts(AUTO, found) is (target or expected)


@pytest.mark.parametrize(
    ("method", "draft", "expected"),
    [
        ("mtp", True, for_experts),
        ("mtp", False, dynamic),
        ("eagle3", True, dynamic),
        ("dspark", True, for_blocks),
        ("ngram", True, whole),
    ],
)
def test_workers_and_scheduler_take_the_same_policy(
    method: str, draft: bool, expected: Any
) -> None:
    found = config(method, target=True, draft=draft)
    assert tree_policy(AUTO, found.speculative_config) is expected
    named = AUTO.model_copy(update={"policy": "whole"})
    assert tree_policy(named, found.speculative_config) is whole
    if method != "ngram":
        levels = {nodes: expected(AUTO, nodes).steps for nodes in (3, 7, 15)}
        assert _levels(AUTO, found, {3, 7, 15}) == levels


def numbers(found: Any) -> list[int]:
    TREES.fill_in(AUTO, found)
    schedule = found.speculative_config.num_speculative_tokens_per_batch_size
    return [nodes for *_, nodes in schedule]


def test_the_schedule_has_the_numbers_of_the_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_graft.spec_decode.tree_part.fall_back", lambda asked, _: asked)
    assert numbers(config("mtp", target=True, draft=True)) == [15, 14, 7, 6, 5, 3, 2, 1, 0]
    dense = [15, 14, 7, 6, 3, 2, 1, 0]
    assert numbers(config("mtp", target=True, draft=False)) == dense
    assert numbers(config("eagle3", target=True, draft=True)) == dense


def test_vllm_has_the_dense_drafts_under_these_names() -> None:
    from vllm.model_executor.models import ModelRegistry

    assert set(ModelRegistry.get_supported_archs()) >= DENSE_DRAFTS
