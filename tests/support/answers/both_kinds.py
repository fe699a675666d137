"""Greedy and seeded answers to prompts of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM


def both_kinds(llm: LLM, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Tokens of two requests per prompt, all greedy ones first, then those with a seed.

    Args:
        llm: the engine.
        prompts: token ids.
        tokens: length of an answer.
    """
    from vllm import SamplingParams

    kinds: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"seed": 7})
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True, **kind) for kind in kinds]
    asked: list[Any] = [{"prompt_token_ids": each} for each in prompts] * len(kinds)
    given = [param for param in params for _ in prompts]
    outputs = llm.generate(asked, given, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
