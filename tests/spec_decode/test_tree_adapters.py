"""LoRA adapters on the target: rows of trees have the adapter of their request."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.engines.pairs import Answer, Pair, Request, answer_all, differing
from tests.support.models.lora_adapters import write_adapter
from vllm_graft.spec_decode.worker_mends import adapt_sampled_rows
from vllm_graft.testing import model_runner, spec_metrics

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

# On a CPU vLLM computes requests without an adapter with the last slot, so one is left empty.
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
TOKENS = 8
FEW = 4


@pytest.fixture(scope="module")
def asked(
    pair: Pair, samples: list[Request], tmp_path_factory: pytest.TempPathFactory
) -> list[Request]:
    """A greedy and a seeded request with each of two adapters, and without one."""
    folder = tmp_path_factory.mktemp("lora")
    names = [
        write_adapter(folder / "head", pair.target, 0, head=True),
        write_adapter(folder / "attention", pair.target, 1, head=False),
        None,
    ]
    return [
        Request(each.prompt, {**each.params, "max_tokens": TOKENS}, name)
        for each in samples[2:4]
        for name in names
    ]


@pytest.fixture(scope="module")
def alone(pair: Pair, asked: list[Request]) -> list[Answer]:
    """The target's answers, with the same adapters and no drafts."""
    with pair.engine(**LORA) as llm:
        return answer_all(llm, asked)


def test_adapters_change_every_answer(alone: list[Answer]) -> None:
    """This guards the tests below: adapters that change nothing would test nothing."""
    for kind in (alone[:3], alone[3:]):
        assert len({tuple(answer.tokens[0]) for answer in kind}) == 3


def test_trees_have_the_adapters_of_their_requests(
    pair: Pair, asked: list[Request], alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two adapters and the target itself in one batch; then two negative controls."""
    few = [Request(each.prompt, {**each.params, "max_tokens": FEW}, each.adapter) for each in asked]

    def spoiled_is_seen(llm: Any) -> bool:
        found = answer_all(llm, few[:3])
        return any(a.tokens[0] != b.tokens[0][:FEW] for a, b in zip(found, alone, strict=False))

    with pair.engine(nodes=12, steps=3, enable_prefix_caching=False, **LORA) as llm:
        assert not differing(answer_all(llm, asked), alone)
        assert spec_metrics(llm).accepted_tokens > 0

        state = model_runner(llm).lora_state
        mapped = state.make_lora_inputs
        for place in range(2):  # rows of logits, then rows of the batch

            def of_the_next_row(*args: Any, place: int = place) -> Any:
                found = list(mapped(*args))
                found[place] = tuple(np.roll(found[place], 1).tolist())
                return tuple(found)

            with monkeypatch.context() as spoiled:
                spoiled.setattr(state, "make_lora_inputs", of_the_next_row)
                assert spoiled_is_seen(llm)


def test_an_adapter_for_each_row_of_logits() -> None:
    state = SimpleNamespace(make_lora_inputs=lambda _: ((2, 0, 1), (2, 2, 0, 1), {2, 1}))
    batch = SimpleNamespace(cu_num_logits_np=np.array([0, 4, 5, 7, 9], dtype=np.int32))
    speculator = SimpleNamespace(context=SimpleNamespace(step=SimpleNamespace(batch=batch)))
    runner = SimpleNamespace(lora_state=state, speculator=speculator)
    adapt_sampled_rows(SimpleNamespace(model_runner=runner))
    assert state.make_lora_inputs([]) == ((2, 2, 2, 2, 0, 1, 1), (2, 2, 0, 1), {2, 1})
