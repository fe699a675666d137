"""Tiny models of each kind of KV cache, and one engine for many assertions."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.models.random_models import USUAL, VOCABULARY, write_random
from vllm_graft.hicache.planning.cost import PREFILL_LEVER
from vllm_graft.testing.models.llama import write_tokenizer


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vllm_graft.testing import write_llama

    return write_llama(tmp_path_factory.mktemp("hicache") / "llama")


@pytest.fixture(scope="session")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model like Gemma 3, with sliding windows and full attention in turn."""
    kinds = ["sliding_attention", "full_attention"] * 2
    folder = tmp_path_factory.mktemp("hicache") / "sliding"
    return _write(folder, "Gemma3ForCausalLM", sliding_window=64, layer_types=kinds)


@pytest.fixture(scope="session")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An LFM2, with convolutions that have a state and full attention in turn."""
    sizes: dict[str, Any] = {
        "layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False,
        "block_dim": 64, "block_ff_dim": 128, "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0, "conv_dim": 64, "conv_dim_out": 64,
    }  # fmt: skip
    return _write(tmp_path_factory.mktemp("hicache") / "recurrent", "Lfm2ForCausalLM", **sizes)


def _write(folder: Path, architecture: str, **sizes: Any) -> Path:
    usual = USUAL | {"intermediate_size": 128, "num_hidden_layers": 4, "pad_token_id": None}
    usual["initializer_range"] = 0.02
    write_random(folder, architecture, dtype="float32", **usual | sizes)
    write_tokenizer(folder, VOCABULARY)
    return folder


@pytest.fixture
def reads_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let storage be read whatever was measured of it, which varies too much on a busy CPU."""
    monkeypatch.setenv(PREFILL_LEVER, "10")
