"""LoRA adapters on the target of trees, on a device, in FULL graphs and 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.support.answers.near_ties import answers, compared, departures
from tests.support.engines.gpu_engines import exact_engine
from tests.support.engines.pairs import Pair
from tests.support.models.lora_adapters import write_adapter
from vllm_graft.spec_decode.verification import adapters
from vllm_graft.testing import model_runner, spec_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

NEAR = 0.1
"""A gap below which two tokens may change places by rounding; vLLM's LoRA kernels need 16 bits."""
TOKENS = 32
LORA: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
    "dtype": "float16",
    "enable_prefix_caching": False,
}


def test_rows_have_the_adapters_of_their_requests(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two adapters, one of the output head as well, and the target itself in one batch."""
    from vllm.lora.request import LoRARequest

    folders = [
        write_adapter(tmp_path / "head", pair.target, 0, head=True),
        write_adapter(tmp_path / "attention", pair.target, 1, head=False),
    ]
    named = [LoRARequest(folder, i, folder) for i, folder in enumerate(folders, start=1)]
    tokenizer = Tokenizer.from_file(str(Path(pair.target) / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in pair.prompts[:2] for _ in range(3)]
    given = [*named, None] * 2
    with exact_engine(pair.target, **LORA) as llm:
        expected = answers(llm, prompts, TOKENS, given)
    assert len({tuple(each.tokens) for each in expected[:3]}) == 3
    trees: dict[str, Any] = {"draft": pair.draft, "tree": {"topk": 4, "steps": 4}, "nodes": 15}
    with exact_engine(pair.target, **trees, **LORA) as llm:
        found = answers(llm, prompts, TOKENS, given)
        counters = model_runner(llm).speculator.context.counters
        accepted = spec_metrics(llm).accepted_tokens
        # Negative control: the output head has the adapter of the request before.
        repeat = adapters.per_sampled_row
        monkeypatch.setattr(
            adapters, "per_sampled_row", lambda given, starts: repeat(np.roll(given, 1), starts)
        )
        spoilt = departures(answers(llm, prompts, TOKENS, given), expected)
    parted, share = departures(found, expected), compared(found, expected)
    print(f"{share:.0%} compared; {parted}; spoilt: {spoilt}; {counters}, accepted {accepted}")
    assert all(each.gap < NEAR for each in parted), parted
    assert share > 0.5
    assert accepted > 0
    assert counters.tree_replays > 0
    assert any(each.gap >= NEAR for each in spoilt)
