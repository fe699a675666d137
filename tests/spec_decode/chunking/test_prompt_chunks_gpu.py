"""Prompts in chunks beside trees, on a device: tokens are the target's, all steps replays."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.engines.gpu_engines import exact_engine
from tests.support.engines.pairs import Request, answer_all, differing
from tests.support.engines.shipped_pair import SHIPPED
from vllm_graft.testing import model_runner

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

ROWS = 128
"""Rows of the largest graph."""

COMPILATION = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 2, 16, 32, 64, 96, ROWS],
}


def arriving() -> list[Request]:
    """Make a long answer, and beside it prompts of 50 to 330 tokens, one after another."""
    texts = json.loads((SHIPPED / "prompts.json").read_text())
    tokenizer = Tokenizer.from_file(str(SHIPPED / "target" / "tokenizer.json"))
    whole = tokenizer.encode("".join(texts)).ids
    lengths = (20, 330, 200, 50, 140, 300)
    parts = [
        tokenizer.decode(whole[400 * place : 400 * place + length])
        for place, length in enumerate(lengths)
    ]
    return [
        Request(part, {"temperature": place % 2, "seed": place, "max_tokens": 8 if place else 200})
        for place, part in enumerate(parts)
    ]


@pytest.mark.parametrize(("fit", "shape"), [(True, "fixed"), (True, "auto"), (False, "fixed")])
def test_chunked_prompts_have_the_target_s_tokens(fit: bool, shape: str) -> None:
    """A chunked engine replays all of these steps; one without chunks launches most of them."""
    requests = arriving()
    options: dict[str, Any] = {
        "max_model_len": 512,
        "max_num_seqs": 2,
        "enable_prefix_caching": False,
        "compilation_config": COMPILATION,
    }
    with exact_engine(SHIPPED / "target", **options) as llm:
        expected = answer_all(llm, requests)
    options |= {"draft": str(SHIPPED / "eagle3"), "nodes": 15}
    tree = {"topk": 4, "steps": 4, "shape": shape, "mixed_graphs": True, "fit_prompts": fit}
    with exact_engine(SHIPPED / "target", tree=tree, **options) as llm:
        counters = model_runner(llm).speculator.context.counters
        # vLLM has warmed its kernels up with a step like these, which is launched.
        before = dataclasses.replace(counters)
        assert differing(answer_all(llm, requests), expected) == []
    assert counters.mixed_replays > before.mixed_replays
    assert (counters.chunked_steps - before.chunked_steps > 3) is fit
    assert (counters.mixed_launches == before.mixed_launches) is fit
