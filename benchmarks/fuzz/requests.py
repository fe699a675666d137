"""Make random requests of every kind that the OpenAI API of `vllm serve` takes, from a seed.

Request `i` depends on the seed and on `i` alone, so one of them can be sent again by its number.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fuzz import kinds
from benchmarks.fuzz.kinds import FIRST_ID, VOCAB, Body
from benchmarks.fuzz.malformed import malformed

PROMPTS = Path(__file__).resolve().parents[2] / "tests" / "pair" / "prompts.json"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class World:
    """The material of requests: the served model's limits, and texts.

    Attributes:
        max_len: most tokens of a prompt and its answer together.
        longest: most tokens of an answer.
        adapters: names of LoRA adapters.
        embed: makes `prompt_embeds` of token ids; None where these are not served.
        thinks: whether thinking budgets are served.
    """

    texts: tuple[str, ...]
    model: str = "pair"
    max_len: int = 512
    vocab: int = VOCAB
    longest: int = 64
    adapters: tuple[str, ...] = ()
    embed: Callable[[list[int]], str] | None = None
    thinks: bool = False

    @classmethod
    def of_pair(cls, **more: Any) -> World:
        """Describe the pair in `tests/pair` and its prompts; `more` are other attributes."""
        return cls(tuple(json.loads(PROMPTS.read_text())), **more)

    def stems(self, seed: int, count: int = 8) -> list[list[int]]:
        """Draw beginnings that prompts have in common, as token ids."""
        numbers = random.Random(f"stems {seed}")
        return [
            [self.token(numbers) for _ in range(numbers.randrange(40, 330))] for _ in range(count)
        ]

    def token(self, numbers: random.Random) -> int:
        """Draw a token id; about half of them are among the frequent ones."""
        end = 400 if numbers.random() < 0.5 else self.vocab
        return numbers.randrange(FIRST_ID, end)


@dataclass(frozen=True)
class FuzzRequest:
    """One HTTP request, and how its answer is to be judged.

    Attributes:
        path: the path of the URL.
        body: JSON; a text is sent as it is.
        kinds: names of its features, for statistics.
        abort_after: chunks of the stream after which the client hangs up; it does not wait at all
            for an answer that is no stream.
        exact: whether the answer is determined: it is not if tokens are sampled without a seed.
        valid: whether stock vLLM is expected to serve it.
    """

    number: int
    path: str
    body: Body | str
    kinds: tuple[str, ...] = ()
    abort_after: int | None = None
    exact: bool = True
    valid: bool = True

    @property
    def stream(self) -> bool:
        return isinstance(self.body, dict) and self.body.get("stream") is True

    @property
    def chat(self) -> bool:
        return self.path == CHAT

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field of the body."""
        return self.body.get(name, default) if isinstance(self.body, dict) else default


def generate(seed: int, count: int, world: World) -> list[FuzzRequest]:
    """Make the first `count` requests of a seed."""
    stems = world.stems(seed)
    return [_request(seed, number, world, stems) for number in range(count)]


FIRST_FLOOD = 1_000_000
"""Number of the first of the large requests."""


def flood(seed: int, each: int, world: World, first: int = FIRST_FLOOD) -> list[FuzzRequest]:
    """Make `each` requests of every kind in `kinds.FLOODS`; no two are equal."""
    rows = [(kind, add) for _ in range(each) for kind, add in kinds.FLOODS.items()]
    body = {"model": world.model, "prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0}
    return [
        FuzzRequest(number, COMPLETIONS, {**body, **add(f"m{seed}_{number}_")}, ("flood", kind))
        for number, (kind, add) in enumerate(rows, first)
    ]


def _request(seed: int, number: int, world: World, stems: list[list[int]]) -> FuzzRequest:
    maker = _Maker(random.Random(f"request {seed} {number}"), world, stems)
    path, body = maker.chat() if maker.chance(0.35) else maker.completion()
    if maker.chance(0.08):
        name, path, broken = malformed(maker.numbers, path, body, world.max_len, world.vocab)
        exact = not isinstance(broken, dict) or maker.exact(broken)
        return FuzzRequest(number, path, broken, ("malformed", name), exact=exact, valid=False)
    abort_after = maker.abort_after(body)
    return FuzzRequest(number, path, body, tuple(maker.kinds), abort_after, maker.exact(body))


class _Maker:
    """Draws one request."""

    def __init__(self, numbers: random.Random, world: World, stems: list[list[int]]) -> None:
        self.numbers = numbers
        self.world = world
        self.stems = stems
        self.kinds: list[str] = []
        self.room = world.max_len
        """How many tokens a prompt may have beside the answer."""

    def chance(self, share: float) -> bool:
        return self.numbers.random() < share

    def some(self, values: Sequence[Any], most: int) -> list[Any]:
        return self.numbers.sample(list(values), self.numbers.randint(1, most))

    def completion(self) -> tuple[str, Body]:
        body = self._base("max_tokens")
        body["prompt"] = self._prompts()
        if self.world.embed and self.chance(0.12):
            self.kinds.append("embeddings")
            body |= {"prompt": None, "prompt_embeds": self.world.embed(self._ids()[:40])}
        elif not self.world.adapters and self.chance(0.15):
            body["echo"] = True
            self.kinds.append("echo")
        if self.chance(0.3):
            body["logprobs"] = self.numbers.choice([0, 1, 3, 5])
            self._logprob_ids(body)
        self._options(body)
        return COMPLETIONS, body

    def chat(self) -> tuple[str, Body]:
        name = "max_tokens" if self.chance(0.5) else "max_completion_tokens"
        body = self._base(name)
        body["messages"] = self._messages()
        if body["messages"][-1]["role"] == "assistant" and self.chance(0.6):
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        # Stock vLLM dies of logprobs of a prompt beside an adapter with an output head on a CPU.
        if not self.world.adapters and self.chance(0.15):
            body["echo"] = True
        if self.chance(0.3):
            body["logprobs"] = True
            if self.chance(0.8):
                body["top_logprobs"] = self.numbers.choice([0, 1, 4])
            self._logprob_ids(body)
        if self.chance(0.04):
            self.kinds.append("tool")
            body |= {"tools": [kinds.TOOL], "tool_choice": kinds.TOOL_CHOICE}
        self._options(body)
        return CHAT, body

    def _logprob_ids(self, body: Body) -> None:
        if self.chance(0.12):
            self.kinds.append("logprobs of ids")
            body["logprob_token_ids"] = self.some(range(FIRST_ID, self.world.vocab), 4)

    def _base(self, length: str) -> Body:
        tokens = self.numbers.choices(
            [1, self.numbers.randint(2, 6), self.numbers.randint(6, 16), 28, 64], [9, 34, 50, 5, 2]
        )[0]
        tokens = min(tokens, self.world.longest)
        self.room = self.world.max_len - tokens
        model = self.numbers.choice([self.world.model, *self.world.adapters])
        if model != self.world.model:
            self.kinds.append("adapter")
        return {"model": model, length: tokens, "return_token_ids": self.chance(0.85)}

    def _options(self, body: Body) -> None:
        if self.chance(0.02):
            self._beams(body)
            return
        if self.chance(0.12):
            self._structure(body)
        else:
            self._features(body)
        if self.chance(0.25):
            self._prediction(body)
        self._sample(body)
        self._answers(body)

    def _beams(self, body: Body) -> None:
        self.kinds.append("beams")
        length = "max_tokens" if "max_tokens" in body else "max_completion_tokens"
        body |= {"use_beam_search": True, "temperature": 0, "n": self.numbers.choice([1, 2, 3])}
        body[length] = self.numbers.randint(1, 5)

    def _features(self, body: Body) -> None:
        for name, (share, values) in kinds.FIELDS.items():
            # vLLM 0.32 ends at logprobs of prompts where an adapter changes the output head.
            if self.chance(share) and (name != "prompt_logprobs" or not self.world.adapters):
                body[name] = self.numbers.choice(values)
        for name, (share, values, most) in kinds.LISTS.items():
            if self.chance(share):
                body[name] = self.some(values, most)
        if self.chance(0.3):
            stops = self.some(kinds.STOPS, 4)
            body["stop"] = stops[0] if len(stops) == 1 else stops
            body["include_stop_str_in_output"] = self.chance(0.3)
        if self.chance(0.12):
            length = int(body.get("max_tokens") or body["max_completion_tokens"])
            body["min_tokens"] = self.numbers.randint(1, length)
        if self.world.thinks and self.chance(0.25):
            body["thinking_token_budget"] = self.numbers.choice(kinds.BUDGETS)

    def _prompts(self) -> Any:
        if self.chance(0.1):
            self.kinds.append("several prompts")
            count = self.numbers.choice([2, 3])
            if self.chance(0.5):
                return [self._text() for _ in range(count)]
            return [self._ids() for _ in range(count)]
        return self._text() if self.chance(0.4) else self._ids()

    def _text(self) -> str:
        text = self.numbers.choice(self.world.texts)
        # A character is at most one token.
        return text[: self.numbers.randint(1, min(len(text), self.room - 2))]

    def _ids(self) -> list[int]:
        stem = self.numbers.choice(self.stems)
        kind = self.numbers.choices(
            ["one token", "few tokens", "longest", "shared prefix"], [18, 12, 4, 66]
        )[0]
        self.kinds.append(kind)
        if kind == "one token":
            return [self.world.token(self.numbers)]
        if kind == "few tokens":
            return [self.world.token(self.numbers) for _ in range(self.numbers.randint(2, 5))]
        head = stem[: self.numbers.randint(1, len(stem))] if self.chance(0.5) else stem
        size = self.room if kind == "longest" else len(head) + self.numbers.randrange(0, 60)
        tail = [self.world.token(self.numbers) for _ in range(max(0, size - len(head)))]
        return [*head, *tail][: self.room]

    def _messages(self) -> list[dict[str, str]]:
        count = self.numbers.choice([1, 1, 2, 3])
        roles = ["system", "user", "assistant"]
        start = 0 if count == 3 else 1
        long = self.room // count - 30
        return [
            {"role": roles[(start + i) % 3], "content": self._text()[:long]} for i in range(count)
        ]

    def _sample(self, body: Body) -> None:
        if self.chance(0.45):
            body["temperature"] = 0
            return
        self.kinds.append("sampled")
        body["temperature"] = self.numbers.choice([0.005, 0.3, 0.7, 1.0, 1.0, 1.5, 2.0])
        if self.chance(0.95):
            body["seed"] = self.numbers.choice([0, 1, -7, self.numbers.randrange(2**62)])
        if self.chance(0.25):
            body["top_p"] = self.numbers.choice([0.1, 0.5, 0.9, 0.99])
        if self.chance(0.25):
            body["top_k"] = self.numbers.choice([0, 1, 5, 50, 5000])
        if self.chance(0.14):
            body["n"] = self.numbers.choice([2, 3])
            self.kinds.append("n")

    def _answers(self, body: Body) -> None:
        if "prompt_logprobs" in body or not self.chance(0.45):
            return
        body["stream"] = True
        if self.chance(0.7):
            options = {"include_usage": True}
            if self.chance(0.3):
                options["continuous_usage_stats"] = True
            body["stream_options"] = options
        if self.chance(0.15):
            body["stream_interval"] = self.numbers.choice([2, 3, 7])

    def _prediction(self, body: Body) -> None:
        kind = self.numbers.choice(sorted(kinds.PREDICTIONS))
        self.kinds.append(f"predicts {kind}")
        text = self.numbers.choice(self.world.texts)
        body["vllm_xargs"] = {"graft_prediction": kinds.PREDICTIONS[kind](self.numbers, text)}

    def _structure(self, body: Body) -> None:
        kind = self.numbers.choice(sorted(kinds.STRUCTURES))
        self.kinds.append(f"structured {kind}")
        body |= json.loads(json.dumps(self.numbers.choice(kinds.STRUCTURES[kind])))

    def abort_after(self, body: Body) -> int | None:
        if not self.chance(0.12 if body.get("stream") else 0.03):
            return None
        self.kinds.append("abort")
        return self.numbers.randint(0, 5)

    def exact(self, body: Body) -> bool:
        return body.get("temperature") == 0 or "seed" in body
