"""Tiny models of each kind of KV cache, and one engine for many assertions."""

from pathlib import Path
from typing import Any

import pytest

from vllm_graft.hicache.planning.cost import PREFILL_LEVER


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vllm_graft.testing import write_llama

    return write_llama(tmp_path_factory.mktemp("hicache") / "llama")


@pytest.fixture(scope="session")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model like Gemma 3, with sliding windows and full attention in turn."""
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        **_SIZES, sliding_window=64, layer_types=["sliding_attention", "full_attention"] * 2
    )
    return _save(config, tmp_path_factory.mktemp("hicache") / "sliding")


@pytest.fixture(scope="session")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An LFM2, with convolutions that have a state and full attention in turn."""
    from transformers import Lfm2Config

    config = Lfm2Config(
        **_SIZES,
        layer_types=["conv", "full_attention"] * 2,
        block_auto_adjust_ff_dim=False,
        block_dim=64,
        block_ff_dim=128,
        block_multiple_of=8,
        block_ffn_dim_multiplier=1.0,
        conv_dim=64,
        conv_dim_out=64,
    )
    return _save(config, tmp_path_factory.mktemp("hicache") / "recurrent")


_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def _save(config: Any, folder: Path) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    from vllm_graft.testing.models.llama import write_tokenizer

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.float32).save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)
    return folder


@pytest.fixture
def reads_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let storage be read whatever was measured of it, which varies too much on a busy CPU."""
    monkeypatch.setenv(PREFILL_LEVER, "10")
