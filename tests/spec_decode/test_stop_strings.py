"""Streams with logprobs in vLLM's frontend, where a step has several tokens.

No engine runs here: its outputs are made up, and vLLM's own code puts them together.
"""

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from tests.support.engines.pairs import Pair
from tests.support.engines.shipped_pair import SHIPPED

TEXT = "def foo(self):\n    return é ü 'x' 日本 self.x\n\n\nclass Bar: # héllo"
STOPS = [" ", "e", "\n", "(", "self", "in", "=", ". ", "é", " b", "日", "def foo", "):\n"]
LENGTH = 50


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(Pair.load(SHIPPED).target)


@dataclass
class Stream:
    """A request's answers, as a client reads them that is slow at times."""

    tokenizer: Any
    numbers: random.Random
    params: dict[str, Any]
    prompt: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt = self.tokenizer.encode("def x(a")
        self.texts = self.tokenizer.encode(TEXT)

    def answers(self) -> list[Any]:
        """Return vLLM's outputs, with several steps in one where the client was slow."""
        processor = OutputProcessor(self.tokenizer, log_stats=False)
        queue = RequestOutputCollector(RequestOutputKind.DELTA, "request")
        children = {name: self._tokens() for name in self._add(processor, queue)}
        found = []
        while processor.request_states:
            step = [self._step(name, left) for name, left in children.items() if left]
            processor.process_outputs([each for each in step if each is not None])
            if self.numbers.random() < 0.6 or not processor.request_states:
                found.append(queue.get_nowait())
        return [output for output in found if output is not None]

    def _add(self, processor: Any, queue: Any) -> Iterator[str]:
        params = SamplingParams(
            max_tokens=LENGTH, output_kind=RequestOutputKind.DELTA, **self.params
        )
        request = EngineCoreRequest(
            request_id="request",
            external_req_id="request",
            prompt_token_ids=self.prompt,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        if params.n == 1:
            processor.add_request(request, "", queue=queue)
            yield "request"
            return
        parent = ParentRequest(request)
        for index in range(params.n):
            child = copy.copy(request)
            child.request_id, child.sampling_params = parent.get_child_info(index)
            processor.add_request(child, "", parent, index, queue)
            yield child.request_id

    def _tokens(self) -> list[int]:
        start = self.numbers.randrange(len(self.texts))
        return (self.texts * 4)[start : start + LENGTH]

    def _step(self, name: str, left: list[int]) -> EngineCoreOutput | None:
        first = len(left) == LENGTH
        if first and self.params.get("n", 1) > 1 and self.numbers.random() < 0.5:
            return None  # This one waits.
        count = 1 if first else self.numbers.randrange(1, 9)
        tokens, left[:] = left[:count], left[count:]
        wanted = first and self.params.get("prompt_logprobs") is not None
        return EngineCoreOutput(
            request_id=name,
            new_token_ids=tokens,
            new_logprobs=LogprobsLists(*(np.array(part) for part in _rows(tokens))),
            new_prompt_logprobs_tensors=self._of_prompt() if wanted else None,
            finish_reason=None if left else FinishReason.LENGTH,
        )

    def _of_prompt(self) -> LogprobsTensors:
        return LogprobsTensors(*(torch.tensor(part) for part in _rows(self.prompt[1:])))


def _rows(tokens: list[int]) -> tuple[list[list[int]], list[list[float]], list[int]]:
    """Make ids, logprobs and ranks of each token and another one."""
    return [[t, t + 1] for t in tokens], [[-1.0, -2.0] for _ in tokens], [1 for _ in tokens]


def misplaced(stream: Stream, echo: bool = False) -> int:
    """Count tokens with another's logprobs, paired as in vLLM's `completion_stream_generator`."""
    wrong, echoed = 0, set()
    for output in stream.answers():
        for answer in output.outputs:
            tokens, places = list(answer.token_ids), list(answer.logprobs)
            if echo and answer.index not in echoed:
                echoed.add(answer.index)
                tokens = [*output.prompt_token_ids, *tokens]
                places = [*(output.prompt_logprobs or []), *places]
            wrong += abs(len(tokens) - len(places))
            pairs = zip(tokens, places)
            wrong += sum(place is not None and token not in place for token, place in pairs)
    return wrong


def stopping(tokenizer: Any, seed: int, n: int = 1) -> Stream:
    numbers = random.Random(seed)
    params = {
        "n": n,
        "stop": numbers.sample(STOPS, numbers.randint(1, 3)),
        "logprobs": 1,
        "min_tokens": numbers.choice([0, 0, 5]),
        "include_stop_str_in_output": numbers.random() < 0.4,
        "stream_interval": numbers.choice([None, 3]),
    }
    return Stream(tokenizer, numbers, params)


@pytest.mark.parametrize("n", [1, 2])
def test_a_stop_string_within_a_step_cuts_tokens_and_logprobs_alike(tokenizer: Any, n: int) -> None:
    stopped = 0
    for seed in range(100):
        assert misplaced(stopping(tokenizer, seed, n)) == 0, seed
        outputs = stopping(tokenizer, seed, n).answers()
        reasons = [answer.finish_reason for output in outputs for answer in output.outputs]
        stopped += reasons.count("stop")
    assert stopped > 60


def test_it_is_seen_where_they_are_not_cut_alike(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = staticmethod(lambda state, output, before: None)
    monkeypatch.setattr(OutputProcessor, "_trim_surplus_tokens", cut)
    assert any(misplaced(stopping(tokenizer, seed)) for seed in range(100))


def test_an_echo_of_one_stream_has_the_prompt_s_logprobs(tokenizer: Any) -> None:
    for seed in range(40):
        params = {"logprobs": 1, "prompt_logprobs": 1}
        assert misplaced(Stream(tokenizer, random.Random(seed), params), echo=True) == 0


def test_echoes_of_several_streams_lose_them(tokenizer: Any) -> None:
    """Number 5 of docs/upstream_issues.md: once vLLM has mended it, this fails, and both can go."""
    params = {"logprobs": 1, "prompt_logprobs": 1, "n": 2}
    streams = [Stream(tokenizer, random.Random(seed), params) for seed in range(40)]
    assert any(misplaced(stream, echo=True) for stream in streams)
