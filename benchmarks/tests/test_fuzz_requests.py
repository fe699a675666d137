"""Requests of the fuzz depend on the seed alone, are of every kind, and fit the model's limits."""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from typing import Any

import pytest
import torch

from benchmarks.fuzz.kinds import FLOODS, PREDICTIONS, STRUCTURES
from benchmarks.fuzz.malformed import _changes
from benchmarks.fuzz.requests import CHAT, FuzzRequest, World, flood, generate
from benchmarks.fuzz.targets import TARGETS

WORLD = World.of_pair()
COUNT = 3000


@pytest.fixture(scope="module")
def requests() -> list[FuzzRequest]:
    return generate(7, COUNT, WORLD)


def bodies(requests: list[FuzzRequest]) -> list[dict[str, Any]]:
    return [r.body for r in requests if r.valid and isinstance(r.body, dict)]


def test_a_request_depends_on_the_seed_and_its_number_alone(requests: list[FuzzRequest]) -> None:
    assert generate(7, 40, WORLD) == requests[:40]
    assert [request.number for request in requests] == list(range(COUNT))
    other = generate(8, 40, WORLD)
    assert sum(a.body == b.body for a, b in zip(other, requests)) == 0


def test_requests_of_every_kind_come(requests: list[FuzzRequest]) -> None:
    named = Counter(name for body in bodies(requests) for name in body)
    wanted = """
        allowed_token_ids bad_words cache_salt echo frequency_penalty ignore_eos
        include_stop_str_in_output logit_bias logprob_token_ids logprobs max_completion_tokens
        max_tokens min_p min_tokens n presence_penalty priority prompt_logprobs
        repetition_detection repetition_penalty response_format return_tokens_as_token_ids seed
        skip_special_tokens stop stop_token_ids stream stream_interval stream_options
        structured_outputs temperature tools top_k top_logprobs top_p truncate_prompt_tokens
        use_beam_search vllm_xargs"""
    assert {name for name in wanted.split() if named[name] < 3} == set()
    kinds = Counter(kind for request in requests for kind in request.kinds)
    assert {f"structured {kind}" for kind in STRUCTURES} <= kinds.keys()
    assert {f"predicts {kind}" for kind in PREDICTIONS} <= kinds.keys()
    for kind in ("one token", "longest", "several prompts", "shared prefix", "abort", "sampled"):
        assert kinds[kind] > 20, kind
    assert 0.2 < sum(request.chat for request in requests) / COUNT < 0.5
    assert 0.2 < sum(request.stream for request in requests) / COUNT < 0.5


def test_every_way_to_spoil_a_request_comes(requests: list[FuzzRequest]) -> None:
    spoiled = {request.kinds[1] for request in requests if not request.valid}
    assert spoiled == {*_changes(WORLD.max_len, WORLD.vocab), "cut", "unknown path", "no prompt"}
    assert any(isinstance(request.body, str) for request in requests)
    for request in requests:
        json.dumps(request.body)


def test_prompts_of_ids_and_their_answers_fit(requests: list[FuzzRequest]) -> None:
    lengths = []
    for body in bodies(requests):
        prompt = body.get("prompt")
        if not isinstance(prompt, list) or isinstance(prompt[0], str):
            continue
        for ids in prompt if isinstance(prompt[0], list) else [prompt]:
            lengths.append(len(ids))
            assert all(0 <= token < WORLD.vocab for token in ids)
            assert 1 <= len(ids) <= WORLD.max_len - body["max_tokens"]
    assert min(lengths) == 1
    assert max(lengths) == WORLD.max_len - 1


def test_prompts_share_prefixes(requests: list[FuzzRequest]) -> None:
    heads = Counter(
        tuple(body["prompt"][:40])
        for body in bodies(requests)
        if isinstance(body.get("prompt"), list) and isinstance(body["prompt"][0], int)
    )
    assert sum(count for head, count in heads.items() if len(head) == 40 and count > 20) > 200


def test_what_nothing_determines_is_not_exact(requests: list[FuzzRequest]) -> None:
    for request in requests:
        if request.valid:
            body = request.body
            assert isinstance(body, dict)
            assert request.exact == (body["temperature"] == 0 or "seed" in body)
    assert 0.9 < sum(request.exact for request in requests) / COUNT < 1


def test_several_answers_are_asked_of_sampled_requests_alone(requests: list[FuzzRequest]) -> None:
    # vLLM refuses other values, except for beams.
    for body in bodies(requests):
        assert body.get("n", 1) == 1 or body["temperature"] > 0 or body.get("use_beam_search")


def test_a_chat_may_go_on_from_its_last_message(requests: list[FuzzRequest]) -> None:
    chats = [request for request in requests if request.path == CHAT and request.valid]
    assert any(request.get("continue_final_message") for request in chats)
    assert all(request.get("messages")[-1]["content"] for request in chats)


def test_a_rich_target_is_asked_for_adapters_embeddings_and_thinking() -> None:
    rich = generate(7, 400, World.of_pair(**TARGETS["rich"].world))
    kinds = Counter(kind for request in rich for kind in request.kinds)
    assert min(kinds[kind] for kind in ("adapter", "embeddings")) > 5
    assert sum("thinking_token_budget" in body for body in bodies(rich)) > 5
    assert {body["model"] for body in bodies(rich)} == {"pair", "one", "two"}
    for body in bodies(rich):
        embeds = body.get("prompt_embeds")
        if embeds is not None:
            assert body["prompt"] is None
            assert "prompt_logprobs" not in body
            table = torch.load(io.BytesIO(base64.b64decode(embeds)))
            assert table.shape[1:] == (128,)
            assert 1 <= len(table) <= 40


def test_no_two_requests_of_a_flood_are_equal_and_most_are_large() -> None:
    asked = flood(7, 3, WORLD)
    assert Counter(request.kinds[1] for request in asked) == dict.fromkeys(FLOODS, 3)
    texts = [json.dumps(request.body) for request in asked]
    assert len(set(texts)) == len(texts)
    assert sum(len(text) > 1_000_000 for text in texts) == 15
    assert flood(7, 3, WORLD) == asked
    assert flood(8, 3, WORLD)[0].body != asked[0].body
