"""Engines of Kimi Linear on a device, whose trees come from a table of the target's answers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.answers.near_ties import Answer
from tests.support.models import table_drafter
from tests.support.models.kimi_models import write_kimi_linear
from tests.support.models.latent_models import VOCABULARY
from vllm_graft.spec_decode.targets.latent.latent_layer import TreeKimiLatents
from vllm_graft.spec_decode.targets.recurrent.delta_layer import TreeKeyDecays
from vllm_graft.testing import model_runner, running, spec_metrics

HIDDEN, NODES, TOKENS = 512, 7, 24
NEAR = 0.5
"""Largest gap of log-probabilities that rounding to bfloat16 explains."""

_RANDOM = random.Random(0)


def prompt_of(length: int) -> list[int]:
    return [_RANDOM.randrange(2, VOCABULARY) for _ in range(length)]


PROMPTS = [prompt_of(_RANDOM.choice([1, 3, 17, 40, 90, 300])) for _ in range(32)]
"""More than run at once, so that prompts meet trees; some are longer than a step's tokens."""


def write_target(folder: Path) -> str:
    """A target whose heads have the size of the published model's."""
    return str(write_kimi_linear(folder, heads=16, head=128, hidden=HIDDEN, dtype="bfloat16"))


@contextmanager
def engine(
    target: str,
    backend: str,
    *,
    trees: bool,
    draft: str = "",
    graphs: str = "FULL_DECODE_ONLY",
    form: str = "auto",
    **options: Any,
) -> Iterator[Any]:
    """An engine without drafts, or with trees from the table, as n-grams or a head's would be."""
    given: dict[str, Any] = {"gdn_prefill_backend": "triton"}
    if trees:
        speculative: dict[str, Any] = {"num_speculative_tokens": NODES}
        if draft:
            # Else the draft would get the target's backend, which has no plain attention.
            speculative |= {"method": "eagle3", "model": draft, "attention_backend": "TRITON_ATTN"}
        else:
            speculative |= {"method": "ngram_gpu", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
        options["speculative_config"] = speculative
        drafter = "table" if draft else "table_alone"
        tree = {"topk": 2, "steps": 4, "recurrent": True, "drafter": drafter}
        given["graft"] = {"tree": {**tree, "recurrent_form": form}}
    sizes = sorted({1, 2, 4, 8} | {requests * (NODES + 1) for requests in (1, 2, 4, 8)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("HF_HUB_OFFLINE", "1")
        # A kernel for several Blackwell GPUs, whose module wants CUTLASS wherever it runs.
        patch.setenv("VLLM_KIMI_K3_GEMM_AR", "0")
        # As vLLM sets it for this model; the test takes it back.
        patch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
        usual: dict[str, Any] = {
            "dtype": "bfloat16",
            "attention_backend": backend,
            "additional_config": given,
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": graphs,
                "cudagraph_capture_sizes": sizes,
            },
            "skip_tokenizer_init": True,
            "max_model_len": 8192,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 256,
            "enable_prefix_caching": False,
            "gpu_memory_utilization": 0.3,
            "kv_cache_memory_bytes": 2**31,
            "disable_log_stats": False,
        }
        with running(target, **usual | options) as llm:
            yield llm


def check_parts(llm: Any, form: str = "inputs") -> None:
    """Trees ran, in graphs and beside prompts, on two layers of each kind, in this form."""
    runner = model_runner(llm)
    layers = runner.vllm_config.compilation_config.static_forward_context.values()
    found = [getattr(layer, name, None) for layer in layers for name in ("_forward", "_attention")]
    ours = [getattr(each, "__wrapped__", each) for each in found]
    assert sum(isinstance(each, TreeKeyDecays) for each in ours) == 2
    assert sum(isinstance(each, TreeKimiLatents) for each in ours) == 2
    assert bool(runner.speculator.context.kept_bytes) is (form == "inputs")
    counters = runner.speculator.context.counters
    print(f"counters: {counters}, {spec_metrics(llm)}")
    assert counters.tree_replays > 0
    assert counters.mixed_launches + counters.mixed_replays > 0


def learn(monkeypatch: pytest.MonkeyPatch, plugin: Any, expected: list[Answer]) -> None:
    """Let the drafter's table hold the target's tokens."""
    table = table_drafter.learned(each.tokens for each in expected)
    monkeypatch.setattr(table_drafter, "NEXT", table)
    plugin(table_drafter)
