"""Trees answer as before after the engine slept, and the draft is as good as before."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engines.gpu_engines import shipped_trees
from tests.support.engines.pairs import Pair
from tests.support.engines.shipped_pair import SHIPPED
from vllm_graft.testing import model_runner

pytestmark = [pytest.mark.gpu, pytest.mark.engine]


def test_trees_after_sleep() -> None:
    """At level 2 the target's weights are loaded again, and vLLM keeps the draft's if told to.

    Both levels are of one engine: vLLM's allocator serves one engine per process.
    """
    from vllm import SamplingParams

    prompts = Pair.load(SHIPPED).prompts[:4]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    options: dict[str, Any] = {
        "enable_sleep_mode": True,
        "sleep_preserve_parameter_names": ["draft.*"],
    }
    eagle = {"head_dtype": "fp8", "hot_tokens": 256, "ngram": True}
    with shipped_trees(eagle, options=options) as llm:
        counters = model_runner(llm).speculator.context.counters

        def answer() -> tuple[list[list[int]], int]:
            before = counters.verify_steps
            found = llm.generate(prompts, params, use_tqdm=False)
            tokens = [list(each.outputs[0].token_ids) for each in found]
            return tokens, counters.verify_steps - before

        expected, steps = answer()
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            if level == 2:
                llm.collective_rpc("reload_weights")
            found, steps_after = answer()
            assert found == expected, level
            assert steps_after <= 1.2 * steps, level
