"""Known differences in answers of stock vLLM 0.32; `docs/upstream_issues.md` has the reasons."""

from __future__ import annotations

from benchmarks.fuzz.answers import Answer
from benchmarks.fuzz.compare import Rule
from benchmarks.fuzz.requests import FuzzRequest


def refused_with_drafts(request: FuzzRequest, expected: Answer, found: Answer) -> bool:
    """vLLM refuses two options, `min_p` and `logit_bias`, with any speculation."""
    asks = bool(request.get("logit_bias")) or (request.get("min_p") or 0) > 0
    return asks and found.status == 400 and "min_p and logit_bias" in found.message


def echo_of_several(request: FuzzRequest, expected: Answer, found: Answer) -> bool:
    """Streams with `n` that echo a prompt with logprobs may lose these, or end in an error."""
    asks = request.stream and request.get("echo") and request.get("logprobs") is not None
    several = (request.get("n") or 1) > 1 and not request.chat
    said = 500 in (expected.status, found.status) or _texts(expected) == _texts(found)
    return bool(asks and several and said)


def _texts(answer: Answer) -> dict[int, object]:
    """Return an answer's texts, tokens and finish reasons, without its logprobs."""
    return {i: (each.text, each.tokens, each.finish) for i, each in answer.choices.items()}


def chain_of_seeds(request: FuzzRequest, expected: Answer, found: Answer) -> bool:
    """vLLM verifies its chain with other noise, so a seed gives other tokens than without it."""
    return request.get("temperature") != 0 and expected.ok and found.ok


def rows_of_drafts(request: FuzzRequest, expected: Answer, found: Answer) -> bool:
    """vLLM returns logprobs of the drafts after a prompt of one token."""
    echoed = request.get("echo") and request.get("logprobs") is not None
    asks = request.get("prompt_logprobs") is not None or (echoed and not request.chat)
    return bool(asks) and _has_one_token(request)


def ids_with_drafts(request: FuzzRequest, expected: Answer, found: Answer) -> bool:
    """VLLM returns logprobs of the best tokens beside drafts, and not those of the chosen ids."""
    return bool(request.get("logprob_token_ids"))


def _has_one_token(request: FuzzRequest) -> bool:
    prompt = request.get("prompt")
    prompts = prompt if isinstance(prompt, list) and isinstance(prompt[0], list | str) else [prompt]
    cut = request.get("truncate_prompt_tokens") == 1
    # A text of one character is one token, and so are some longer ones.
    return cut or any(prompt is not None and len(prompt) <= 8 for prompt in prompts)


ALWAYS: dict[str, Rule] = {"echo of several": echo_of_several}
WITH_DRAFTS: dict[str, Rule] = {**ALWAYS, "refused with drafts": refused_with_drafts}
STOCK_CHAIN: dict[str, Rule] = {
    **WITH_DRAFTS,
    "stock: seeds": chain_of_seeds,
    "stock: rows of drafts": rows_of_drafts,
    "stock: ids": ids_with_drafts,
}
