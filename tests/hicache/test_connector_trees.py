"""Trees of drafts with the host KV cache: K/V that trees wrote is loaded, and tokens are right."""

from typing import Any

import pytest

from tests.support.engines.cache_engines import generate, metrics, transfer
from tests.support.engines.pairs import Pair
from tests.support.engines.shipped_pair import SHIPPED

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

TOKENS = 90


def _turns(llm: Any, prompts: list[Any], load: bool) -> tuple[list[list[int]], list[list[int]]]:
    """Generate a long answer to each prompt, then an answer to prompt and answer."""
    first = llm.generate(prompts, _greedy(TOKENS), use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in first]
    if load:
        # With async scheduling vLLM frees the last blocks a step late.
        while not llm.reset_prefix_cache():
            llm.llm_engine.step()
    again = [
        {"prompt_token_ids": [*output.prompt_token_ids, *answer]}
        for output, answer in zip(first, tokens)
    ]
    second, cached = generate(llm, again, 24)
    if load:
        # The blocks of the first answers, which trees have written, are among them.
        assert all(count > len(output.prompt_token_ids) for count, output in zip(cached, first))
    return tokens, second


def _greedy(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def test_blocks_that_trees_have_written() -> None:
    pair = Pair.load(SHIPPED)
    prompts = pair.prompts[:2]
    from vllm_graft.testing import cpu_engine

    with cpu_engine(pair.target) as llm:
        expected = _turns(llm, prompts, load=False)
    options = transfer(load="async")
    with pair.engine(nodes=15, async_scheduling=True, kv_transfer_config=options) as llm:
        assert _turns(llm, prompts, load=True) == expected
        assert metrics(llm)["hit_tokens_host"] > 2 * 32


def test_a_load_beside_a_tree_in_one_graph() -> None:
    """The prompt's blocks come from the host in a step that is replayed as a whole."""
    from vllm_graft.testing import cpu_engine
    from vllm_graft.testing.engine import model_runner

    pair = Pair.load(SHIPPED)
    known = (pair.prompts[1] + pair.prompts[2])[:280]

    def serve(llm: Any, load: bool) -> dict[str, list[int]]:
        found = _answers(llm, {"before": (0, known, 4)})
        while load and not llm.reset_prefix_cache():
            llm.llm_engine.step()
        return found | _answers(llm, {"tree": (0, pair.prompts[0][:60], 16), "same": (2, known, 6)})

    with cpu_engine(pair.target) as llm:
        expected = serve(llm, load=False)
    with pair.engine(
        nodes=7,
        tree={"mixed_graphs": True},
        max_num_seqs=2,
        attention="triton",
        graphs=[4, 16, 64, 128],
        kv_transfer_config=transfer(load="layerwise"),
    ) as llm:
        assert serve(llm, load=True) == expected
        assert metrics(llm)["hit_tokens_host"] > 0
        assert model_runner(llm).speculator.context.counters.mixed_replays > 0


def _answers(llm: Any, requests: dict[str, tuple[int, str, int]]) -> dict[str, list[int]]:
    """Return tokens by name of requests that start at a step each: (step, prompt, tokens)."""
    engine, step, found = llm.llm_engine, 0, {}
    while len(found) < len(requests):
        for name, (start, prompt, tokens) in requests.items():
            if start == step:
                engine.add_request(name, prompt, _greedy(tokens))
        for output in engine.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
    return found
