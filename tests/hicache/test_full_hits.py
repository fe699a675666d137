"""Full hits while the device's blocks hold wrong bytes: are the tokens right?

A prompt of whole blocks and one token that is wholly on the host leaves one token to compute, which
vLLM runs as a decode: on a GPU in a FULL graph, where no Python runs between the layers. If the
graph did not wait for the load it would read what was in the blocks before, which is overwritten
here with a constant before every load, and loads are delayed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines.cache_engines import transfer
from tests.support.host_cache.submitted_loads import delay_loads
from vllm_graft.bench.hicache.prompt_driver import Driver, random_prompt
from vllm_graft.testing import TinyShape, cpu_engine, model_runner, running, write_llama

BLOCK = 32
PROMPT = 4 * BLOCK + 1
TOKENS = 4

# It is finite, because masked positions are multiplied by zero, and far from a model's values.
POISON = 3.0

DELAY = 4_000_000
"""Cycles of the device's clock by which each load is delayed: about two milliseconds."""


def poison(llm: Any) -> None:
    """Overwrite the device's K/V, in process: an RPC may replace weights, so it ends all hits."""
    for cache in model_runner(llm).kv_caches:
        cache.fill_(POISON)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def delay() -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    delay_loads(get_kv_transfer_group().worker.engine, DELAY)


def options(load: str) -> dict[str, Any]:
    return {
        "block_size": BLOCK,
        "kv_transfer_config": transfer(host_bytes=2**26, load=load),
        "num_gpu_blocks_override": 33,
        "max_model_len": 256,
        "enable_prefix_caching": True,
    }


def race(llm: Any, rounds: int) -> None:
    """Compare full hits with the answers of hits in the device's own cache."""
    driver = Driver(llm)
    prompts = [random_prompt(f"race{number}", PROMPT, 500) for number in range(6)]
    waves: Sequence[list[list[int]]] = [prompts[:2], prompts[2:4], prompts[4:]]
    expected = []
    for wave in waves:
        driver.run(wave, TOKENS)
        # Loads may end in different steps: a batch of another size may round differently.
        together = [answer.tokens for answer in driver.run(wave, TOKENS)]
        alone = [driver.run([prompt], TOKENS)[0].tokens for prompt in wave]
        expected.append(list(zip(together, alone, strict=True)))
        driver.settle(0.02)
    assert len({tuple(first) for wave in expected for first, _ in wave}) > 3
    for number in range(rounds):
        wave, right = waves[number % 3], expected[number % 3]
        driver.forget_device()
        poison(llm)
        answers = driver.run(wave, TOKENS)
        assert [answer.cached for answer in answers] == [PROMPT - 1] * 2
        assert all(answer.tokens in known for answer, known in zip(answers, right, strict=True))
    # Negative control: wrong bytes in blocks that are in use change tokens.
    driver.run(waves[0], TOKENS)
    poison(llm)
    answers = driver.run(waves[0], TOKENS)
    assert any(
        answer.tokens not in known for answer, known in zip(answers, expected[0], strict=True)
    )


@pytest.mark.engine
@pytest.mark.parametrize("load", ["layerwise", "async"])
def test_full_hits(tmp_path: Path, load: str) -> None:
    with cpu_engine(write_llama(tmp_path / "model"), **options(load)) as llm:
        race(llm, rounds=3)


@pytest.mark.gpu
@pytest.mark.parametrize("load", ["layerwise", "async"])
def test_full_hits_while_copies_are_slow(
    tmp_path: Path, load: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    shape = TinyShape(hidden_size=512, num_layers=8, num_heads=4, num_kv_heads=4, head_dim=128)
    # Batches come together differently each time, and in 16 bits that alone changes tokens.
    more = {
        "dtype": "float32",
        "attention_config": {"backend": "TRITON_ATTN"},
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [2],
        },
        "gpu_memory_utilization": 0.3,
        "disable_log_stats": False,
    }
    with running(write_llama(tmp_path / "model", shape), **options(load), **more) as llm:
        delay()
        race(llm, rounds=60)
