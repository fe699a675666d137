"""Requests with structured output to the pair, of each kind of structure."""

from __future__ import annotations

from typing import Any

from tests.support.engines.pairs import Pair, Request

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
