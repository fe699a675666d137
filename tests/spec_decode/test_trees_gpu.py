"""Trees on a device: after sleep, with LoRA adapters, grammars, and chunked prompts."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.support.answers.near_ties import answers, compared, departures
from tests.support.answers.text_requests import COMPACT, structured_requests
from tests.support.engines.gpu_engines import shipped_trees
from tests.support.engines.pairs import Pair, Request, answer_all, differing
from tests.support.engines.shipped_pair import SHIPPED
from tests.support.models.lora_adapters import write_adapter
from vllm_graft.testing import model_runner, spec_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.engine]


def test_trees_after_sleep() -> None:
    """At level 2 the target's weights are loaded again, and vLLM keeps the draft's if told to.

    Both levels are of one engine: vLLM's allocator serves one engine per process.
    """
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
    folders = [
        write_adapter(tmp_path / "head", pair.target, 0, head=True),
        write_adapter(tmp_path / "attention", pair.target, 1, head=False),
    ]
    named = [LoRARequest(folder, i, folder) for i, folder in enumerate(folders, start=1)]
    tokenizer = Tokenizer.from_file(str(Path(pair.target) / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in pair.prompts[:2] for _ in range(3)]
    given = [*named, None] * 2
    with pair.on("cuda").engine(**LORA) as llm:
        expected = answers(llm, prompts, TOKENS, given)
    assert len({tuple(each.tokens) for each in expected[:3]}) == 3
    with pair.on("cuda").engine(nodes=15, **LORA) as llm:
        found = answers(llm, prompts, TOKENS, given)
        counters = model_runner(llm).speculator.context.counters
        accepted = spec_metrics(llm).accepted_tokens
        # Negative control: the output head has the adapter of the row before.
        state = model_runner(llm).lora_state
        mapped = state.make_lora_inputs

        def of_the_next_row(*args: Any) -> Any:
            of_logits, *others = mapped(*args)
            return tuple(np.roll(of_logits, 1).tolist()), *others

        monkeypatch.setattr(state, "make_lora_inputs", of_the_next_row)
        spoilt = departures(answers(llm, prompts, TOKENS, given), expected)
    parted, share = departures(found, expected), compared(found, expected)
    print(f"{share:.0%} compared; {parted}; spoilt: {spoilt}; {counters}, accepted {accepted}")
    assert all(each.gap < NEAR for each in parted), parted
    assert share > 0.5
    assert accepted > 0
    assert counters.tree_replays > 0
    assert any(each.gap >= NEAR for each in spoilt)


PENALIZED: list[dict[str, Any]] = [
    {"temperature": 0, "repetition_penalty": 1.3},
    {"seed": 1, "presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"temperature": 0, "bad_words": ["return", "self", "import", "def", "pathname"]},
]
THINKING: dict[str, Any] = {
    "reasoning_config": {"reasoning_start_str": " hereby", "reasoning_end_str": " return self"}
}


def test_tokens_are_those_of_the_target_alone(pair: Pair) -> None:
    """Asynchronous scheduling is vLLM's default on a device."""
    requests = structured_requests(pair, 40) + [
        Request(pair.prompts[i], {"max_tokens": 40, **params})
        for i, params in enumerate([*PENALIZED, {"temperature": 0}, {"seed": 7}])
    ]
    # This prompt ends where the model begins to think.
    requests += [
        Request(
            pair.prompts[1], {"max_tokens": 20, "temperature": 0, "thinking_token_budget": budget}
        )
        for budget in (3, 4, 6)
    ]
    options = COMPACT | THINKING
    with pair.on("cuda").engine(**options) as llm:
        expected = answer_all(llm, requests)
    assert all(" return self" in answer.texts[0] for answer in expected[-3:])
    with pair.on("cuda").engine(nodes=15, **options) as llm:
        assert differing(answer_all(llm, requests), expected) == []
        metrics = spec_metrics(llm)
    assert metrics.accepted_tokens > metrics.drafts / 4


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
    pair = Pair.load(SHIPPED).on("cuda")
    with pair.engine(**options) as llm:
        expected = answer_all(llm, requests)
    tree = {"shape": shape, "mixed_graphs": True, "fit_prompts": fit}
    with pair.engine(nodes=15, tree=tree, **options) as llm:
        counters = model_runner(llm).speculator.context.counters
        # vLLM has warmed its kernels up with a step like these, which is launched.
        before = dataclasses.replace(counters)
        assert differing(answer_all(llm, requests), expected) == []
    assert counters.mixed_replays > before.mixed_replays
    assert (counters.chunked_steps - before.chunked_steps > 3) is fit
    assert (counters.mixed_launches == before.mixed_launches) is fit
