"""Targets with sliding windows and attention sinks: answers are those of vLLM without drafts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import table_drafter
from tests.support.shipped_pair import SHIPPED
from vllm_graft.spec_decode.attention import layer as grafted
from vllm_graft.spec_decode.attention import plain_attention
from vllm_graft.spec_decode.targets.dense import DenseFamily
from vllm_graft.testing import cpu_engine, greedy, spec_metrics, write_eagle3
from vllm_graft.testing.pairs import Answer, Pair, Request, answer_all, differing

pytestmark = pytest.mark.engine

WINDOW, BLOCK = 16, 32
"""The window is shorter than most prompts, so that blocks leave it while a request runs."""


def with_windows(source: Path, folder: Path, kinds: list[str]) -> Path:
    """Copy a checkpoint, and give some of its layers a window."""
    shutil.copytree(source, folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config |= {"sliding_window": WINDOW, "layer_types": kinds}
    file.write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Make a pair with a window in every other layer of the target, and in the draft."""
    folder = tmp_path_factory.mktemp("windows")
    kinds = ["sliding_attention", "full_attention"] * 3
    with_windows(SHIPPED / "target", folder / "target", kinds)
    with_windows(SHIPPED / "eagle3", folder / "eagle3", kinds[:1])
    shutil.copy(SHIPPED / "prompts.json", folder)
    return Pair.load(folder)


@pytest.fixture(scope="module")
def requests(windows: Pair) -> list[Request]:
    kinds = [{"temperature": 0}, {"seed": 7}]
    return [
        Request(prompt, {"max_tokens": 48, **kind})
        for prompt in windows.prompts[:4]
        for kind in kinds
    ]


@pytest.fixture(scope="module")
def alone(windows: Pair, requests: list[Request]) -> list[Answer]:
    with windows.engine(block_size=BLOCK) as llm:
        return answer_all(llm, requests)


def test_trees_answer_as_the_target_alone(
    windows: Pair, requests: list[Request], alone: list[Answer]
) -> None:
    with windows.engine(nodes=15, block_size=BLOCK) as llm:
        assert differing(answer_all(llm, requests), alone) == []
        metrics = spec_metrics(llm)
    assert metrics.accepted_tokens > metrics.drafts / 2


def test_trees_without_the_window_answer_otherwise(
    windows: Pair, requests: list[Request], alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: tree rows that see every key draw other tokens."""
    monkeypatch.setattr(grafted, "window_of", lambda impl: 0)
    with windows.engine(nodes=15, block_size=BLOCK) as llm:
        assert differing(answer_all(llm, requests), alone) != []


# --- models as they are published, with windows, sinks and shared K/V ---------------------------


def write_gpt_oss(folder: Path) -> Path:
    """Write a random gpt-oss of four layers; `write_eagle3`'s head has its sizes."""
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, num_local_experts=4, num_experts_per_tok=2,
        vocab_size=512, sliding_window=WINDOW, initializer_range=0.3,
        layer_types=["sliding_attention", "full_attention"] * 2, max_position_embeddings=2048,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 1024,
        },
        bos_token_id=0, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GptOssForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.normal_(1.0, 1.0)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def write_gemma4(folder: Path) -> Path:
    """Write a random Gemma 4 whose last two layers read K/V of earlier ones, in the same sizes."""
    import torch
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, global_head_dim=64, vocab_size=512,
        sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2, hidden_size_per_layer_input=0, max_position_embeddings=2048,
        initializer_range=0.3, pad_token_id=0, bos_token_id=2, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma4ForCausalLM(config)
    # Otherwise each token would be followed by itself, because the output head is the embedding.
    model.model.embed_tokens.weight.data.mul_(0.05)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def without_sinks(patch: pytest.MonkeyPatch) -> None:
    stock = plain_attention._attend
    patch.setattr(plain_attention, "_attend", lambda *args: stock(*args[:-1], None))


def moved_twice(patch: pytest.MonkeyPatch) -> None:
    """Let both layers that read the same K/V move it."""
    stock = DenseFamily.state

    def state(self: DenseFamily, layers: Any, *args: Any) -> Any:
        own = {
            name: SimpleNamespace(kv_cache=layer.kv_cache, kv_sharing_target_layer_name=None)
            for name, layer in layers.items()
        }
        return stock(self, own, *args)

    patch.setattr(DenseFamily, "state", state)


PROMPTS = [[7, 3, 9, 30, 2], [5] * 40, list(range(1, 90))]


@pytest.mark.parametrize(
    ("write", "spoil"), [(write_gpt_oss, without_sinks), (write_gemma4, moved_twice)]
)
def test_families_with_trees_of_another_drafter(
    write: Callable[[Path], Path],
    spoil: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    plugin: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts from a table of the target's tokens are accepted far more than a random head's."""
    target, draft = write(tmp_path / "target"), write_eagle3(tmp_path / "draft")
    options: dict[str, Any] = {
        "max_model_len": 256,
        "block_size": BLOCK,
        "skip_tokenizer_init": True,
    }
    with cpu_engine(target, **options) as llm:
        expected = greedy(llm, PROMPTS, 40)
    monkeypatch.setattr(table_drafter, "NEXT", table_drafter.learned(expected))
    plugin(table_drafter)
    options["speculative_config"] = {
        "method": "eagle3",
        "model": str(draft),
        "num_speculative_tokens": 7,
    }
    options["additional_config"] = {"graft": {"tree": {"topk": 2, "steps": 4, "drafter": "table"}}}
    with cpu_engine(target, **options) as llm:
        assert greedy(llm, PROMPTS, 40) == expected
        metrics = spec_metrics(llm)
    assert metrics.accepted_tokens > metrics.drafts
    # Negative control: with the spoilt code tokens differ.
    spoil(monkeypatch)
    with cpu_engine(target, **options) as llm:
        assert greedy(llm, PROMPTS, 40) != expected
