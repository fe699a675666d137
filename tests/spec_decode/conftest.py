"""A trained pair, and engines that serve it with and without a tree."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from vllm import LLM

SHIPPED = Path(__file__).parents[1] / "pair"


@dataclass(frozen=True)
class Pair:
    """A target, an EAGLE-3 head trained for it, and prompts that neither has seen."""

    target: str
    draft: str
    prompts: list[str]

    def engine(
        self,
        *,
        nodes: int = 0,
        topk: int = 4,
        steps: int = 4,
        chain: int = 0,
        draft: str | None = None,
        eagle: dict[str, Any] | None = None,
        method: str = "eagle3",
        **options: Any,
    ) -> contextlib.AbstractContextManager[LLM]:
        """An engine in this process: with a tree of `nodes`, a stock chain, or no drafts."""
        from vllm_graft.testing import cpu_engine

        tokens = nodes or chain
        if tokens:
            options["speculative_config"] = {
                "method": method,
                "model": draft or self.draft,
                "num_speculative_tokens": tokens,
            }
        if nodes:
            keys = {"topk": topk, "steps": steps, **(eagle or {})}
            options["additional_config"] = {"graft": {"eagle": keys}}
        return cpu_engine(self.target, **options)


@pytest.fixture(scope="session")
def pair() -> Pair:
    """The pair in the repository, or the one in ``$GRAFT_PAIR``, of the same folder layout."""
    folder = Path(os.environ.get("GRAFT_PAIR", SHIPPED))
    prompts = json.loads((folder / "prompts.json").read_text())
    return Pair(str(folder / "target"), str(folder / "eagle3"), prompts)


Sample = tuple[str, dict[str, Any]]


def sample_all(llm: LLM, samples: list[Sample]) -> list[list[int]]:
    """Token ids of each (prompt, sampling parameters)."""
    from vllm import SamplingParams

    params = [SamplingParams(ignore_eos=True, **values) for _, values in samples]
    outputs = llm.generate([prompt for prompt, _ in samples], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="session")
def samples(pair: Pair) -> list[Sample]:
    """Greedy and seeded requests in turn, one a prompt."""
    count = int(os.environ.get("GRAFT_PROMPTS", "12"))
    tokens = int(os.environ.get("GRAFT_TOKENS", "20"))
    return [
        (prompt, {"max_tokens": tokens} | ({"temperature": 0} if i % 2 else {"seed": 100 + i}))
        for i, prompt in enumerate(pair.prompts[:count])
    ]


@pytest.fixture(scope="session")
def expected(pair: Pair, samples: list[Sample]) -> list[list[int]]:
    """What the target alone answers to `samples`."""
    with pair.engine() as llm:
        return sample_all(llm, samples)


@pytest.fixture
def answer() -> Callable[[LLM, list[Sample]], list[list[int]]]:
    return sample_all


@pytest.fixture
def metric() -> Callable[[LLM, str], float]:
    """Sum of a counter of an engine's, by its Prometheus name."""

    def read(llm: LLM, name: str) -> float:
        return sum(m.value for m in llm.get_metrics() if m.name == name)

    return read
