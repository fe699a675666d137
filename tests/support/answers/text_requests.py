"""Requests to tiny models that drafters are tested with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.support.engines.pairs import Pair, Request

if TYPE_CHECKING:
    from vllm import LLM

TEXTS = [
    "def main(argv):\n    return",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "x = [int(y) for y in z]",
    "The quick brown fox jumps over the lazy dog. " * 2 + "And then?",
]
"""Two of them begin alike, so that prefixes are found again."""


def greedy(tokens: int, texts: Sequence[str] = TEXTS) -> list[Request]:
    """Ask for so many tokens of each text, greedily."""
    return [Request(text, {"max_tokens": tokens, "temperature": 0}) for text in texts]


def seeded(tokens: int, texts: Sequence[str] = TEXTS) -> list[Request]:
    """Ask for so many tokens of each text, with a seed."""
    return [Request(text, {"max_tokens": tokens, "seed": 7}) for text in texts]


def in_pairs(tokens: int, texts: Sequence[str], **seeded: Any) -> list[Request]:
    """Ask for so many tokens of each text, greedily and, next to it, with a seed."""
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 7, **seeded}]
    return [Request(text, {"max_tokens": tokens, **kind}) for text in texts for kind in kinds]


def shortened(request: Request, tokens: int) -> Request:
    """The same request for so many tokens."""
    return replace(request, params={**request.params, "max_tokens": tokens})


def both_kinds(llm: LLM, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Tokens of two requests per prompt, all greedy ones first, then those with a seed."""
    from vllm import SamplingParams

    kinds: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"seed": 7})
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True, **kind) for kind in kinds]
    asked: list[Any] = [{"prompt_token_ids": each} for each in prompts] * len(kinds)
    given = [param for param in params for _ in prompts]
    outputs = llm.generate(asked, given, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


GREEDY = {"temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["self", "return"]}, "ok": {"type": "boolean"}},
    "required": ["a", "ok"],
    "additionalProperties": False,
}
STRUCTURED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "JSON": ({"json": SCHEMA}, GREEDY),
    "JSON with a seed": ({"json": SCHEMA}, {"seed": 1, "temperature": 0.6}),
    "regex": ({"regex": r"( |\n)*(def|return|self)[ -z\n]{12,40}"}, GREEDY),
    "regex with a seed": ({"regex": r"[a-z_\.\(\) \n=]{12,60}"}, {"seed": 2, "top_k": 50}),
    "choice": ({"choice": ["return self", "raise ValueError", "self.x = None"]}, GREEDY),
    "grammar": ({"grammar": 'root ::= "self." name\nname ::= [a-z_]+'}, {"seed": 3}),
    "logprobs": ({"regex": r"[a-z_\.\(\) \n=]{12,60}"}, {**GREEDY, "logprobs": 2}),
}
"""By kind, the structure and other parameters."""

COMPACT: dict[str, Any] = {
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}
}
"""For the engine: the pair's model would fill JSON with blank lines."""


def structured_requests(pair: Pair, max_tokens: int) -> list[Request]:
    """One request of each kind of `STRUCTURED`."""
    from vllm.sampling_params import StructuredOutputsParams

    return [
        Request(
            pair.prompts[1 + i % 5],
            {
                "max_tokens": max_tokens,
                "ignore_eos": False,
                **params,
                "structured_outputs": StructuredOutputsParams(**structure),
            },
        )
        for i, (structure, params) in enumerate(STRUCTURED.values())
    ]
