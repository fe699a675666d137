"""A step without chunks holds the longest prompt, or the engine says so before a model loads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.support.checkpoints import write_configs
from tests.support.models.latent_models import write_target
from vllm_graft.base.errors import ConfigError
from vllm_graft.plan.request import inspecting
from vllm_graft.spec_decode import tree_part

on_cpu = pytest.mark.skipif(current_platform.device_type != "cpu", reason="needs vLLM for CPUs")

LENGTH, BATCHED = 128, 64
NGRAMS = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 4}
TREES = {"graft": {"tree": {"topk": 2, "steps": 4}}}


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_target(tmp_path_factory.mktemp("latent")))


def configured(model: str, **changed: Any) -> Any:
    """Configure an engine whose steps are shorter than its model's length."""
    options: dict[str, Any] = {
        "block_size": 16,
        "dtype": "float32",
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "max_model_len": LENGTH,
        "max_num_batched_tokens": BATCHED,
        "max_num_seqs": 2,
        "skip_tokenizer_init": True,
        "speculative_config": NGRAMS,
        **changed,
    }
    with inspecting():
        return EngineArgs(model, **options).create_engine_config()


def first_step(vllm_config: Any, rows: int) -> int:
    """How many tokens of a prompt of `rows` tokens vLLM's scheduler gives the first turn."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    vllm_config.cache_config.num_gpu_blocks = 64
    grammars = StructuredOutputManager(vllm_config)
    cache = KVCacheConfig(64, [], [KVCacheGroupSpec(["layer"], spec)])
    scheduler = Scheduler(vllm_config, cache, grammars, block_size=16)
    scheduler.add_request(Request("one", [5] * rows, SamplingParams(max_tokens=4), None))
    return int(scheduler.schedule().total_num_scheduled_tokens)


@on_cpu
def test_a_prompt_longer_than_a_batch_gets_its_turn(latent: str) -> None:
    """VLLM turns chunks off for MLA on a CPU, and raises one of two limits."""
    trees = configured(latent, attention_backend="CPU_MLA", additional_config=TREES)
    assert not trees.scheduler_config.enable_chunked_prefill
    assert first_step(trees, LENGTH - 1) == LENGTH - 1
    # Negative control: stock vLLM's drafts.
    stock = configured(latent, attention_backend="CPU_MLA")
    assert first_step(stock, BATCHED) == BATCHED
    assert first_step(stock, BATCHED + 1) == 0


@on_cpu
def test_what_would_wait_forever_is_refused(latent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trees: dict[str, Any] = {"attention_backend": "CPU_MLA", "additional_config": TREES}
    # A limit that the user gave is not changed.
    with pytest.raises(ConfigError, match="--max-num-scheduled-tokens is 126, but without chunked"):
        configured(latent, **trees, max_num_scheduled_tokens=LENGTH - 2)
    exact = configured(latent, **trees, max_num_scheduled_tokens=LENGTH - 1)
    assert first_step(exact, LENGTH - 1) == LENGTH - 1
    # Negative control: this is what vLLM derives.
    monkeypatch.setattr(tree_part, "make_room", lambda vllm_config: None)
    with pytest.raises(ConfigError, match="--max-num-scheduled-tokens is 64, but without chunked"):
        configured(latent, **trees)


def test_other_targets_without_chunks(tmp_path: Path) -> None:
    """VLLM itself asks for batches of the model's length there, and derives the other limit."""
    target, draft = map(str, write_configs(tmp_path))
    eagle = {"method": "eagle3", "model": draft, "num_speculative_tokens": 7}
    chunks: dict[str, Any] = {"speculative_config": eagle, "additional_config": TREES}
    whole = {**chunks, "enable_chunked_prefill": False}
    config = configured(target, **whole, max_num_batched_tokens=LENGTH)
    assert first_step(config, LENGTH - 1) == LENGTH - 1
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(64\) is smaller"):
        configured(target, **whole)
    # With chunks any limit does.
    config = configured(target, **chunks)
    assert config.scheduler_config.max_num_scheduled_tokens == BATCHED
    assert first_step(config, LENGTH - 1) == BATCHED
