"""Real engines whose n-grams are found in other requests' texts too."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.support.engines.pairs import Answer, Pair, Request, answer_all, counter, differing
from vllm_graft.plan.memory import memory_of
from vllm_graft.spec_decode.lookup import ngrams
from vllm_graft.spec_decode.lookup.owners import Owners
from vllm_graft.spec_decode.trees.memory_state import bytes_of
from vllm_graft.spec_decode.trees.ngram_state import MAX_PLACE
from vllm_graft.spec_decode.trees.reference import Owner
from vllm_graft.testing import cpu_engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TOKENS, REQUESTS = 20, 3
SMALL = {"bytes": bytes_of(2 * REQUESTS, REQUESTS)}
CROWDED: dict[str, Any] = {
    "max_num_seqs": REQUESTS,
    "max_num_batched_tokens": 72,
    "enable_prefix_caching": True,
    "async_scheduling": True,
}


@pytest.fixture(scope="module")
def requests(pair: Pair) -> list[Request]:
    """Greedy and seeded ones; their prompts repeat nothing."""
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 7, "temperature": 0.5}]
    return [
        Request(prompt, {"max_tokens": TOKENS, **kind})
        for prompt in pair.prompts[:2]
        for kind in kinds
    ]


@pytest.fixture(scope="module")
def right(pair: Pair, requests: list[Request]) -> list[Answer]:
    """The answers of the target alone."""
    with cpu_engine(pair.target) as llm:
        return answer_all(llm, requests)


def salted(request: Request, salt: str) -> Request:
    """The same request of a tenant."""
    prompt: Any = {"prompt": request.prompt, "cache_salt": salt}
    return dataclasses.replace(request, prompt=prompt)


class Watch:
    """Looks up whose texts are drafted, in the memory itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drafted = self.foreign = 0
        self.tenants: dict[int, str | None] = {}
        search, of = ngrams.search_memory, Owners.of

        def watched(state: Any, lengths: Any, slots: Any, num_reqs: int) -> None:
            search(state, lengths, slots, num_reqs)
            for row, slot in enumerate(slots.tolist()[:num_reqs]):
                for key in filter(None, state.keys[row, -state.matches :].tolist()):
                    place = key % MAX_PLACE + 1 - state.history.shape[1]
                    theirs = int(state.memory.segments[place // 64, 1])
                    mine = int(state.memory.writers[slot, 1])
                    self.drafted += 1
                    self.foreign += self.tenants[theirs] != self.tenants[mine]

        def told(owners: Owners, request: Any) -> Owner:
            owner = of(owners, request)
            # Prompts have numbers of their own in each tenant, also where scopes are ignored.
            self.tenants[owner.prompt] = request.cache_salt
            return owner

        monkeypatch.setattr(ngrams, "search_memory", watched)
        monkeypatch.setattr(Owners, "of", told)


def counts(llm: Any) -> tuple[float, float]:
    """Nodes of the memory that were verified, and accepted."""
    names = ("verified", "accepted")
    verified, accepted = (counter(llm, f"vllm:graft_tree_memory_nodes_{name}") for name in names)
    return verified, accepted


def test_ngrams_alone_remember_their_tenant(
    pair: Pair, requests: list[Request], right: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two epochs, tenants, a ring that wraps, slots that change hands; then scopes are ignored."""
    watch = Watch(monkeypatch)
    speculative = {
        "method": "ngram_gpu",
        "num_speculative_tokens": 15,
        "prompt_lookup_min": 3,
        "prompt_lookup_max": 8,
    }
    tree = {"topk": 4, "steps": 8, "memory": SMALL}
    options = {"speculative_config": speculative, "additional_config": {"graft": {"tree": tree}}}
    with cpu_engine(pair.target, **options, **CROWDED) as llm:
        before = int(counter(llm, "vllm:graft_tree_steps"))
        assert not differing(answer_all(llm, requests), right)
        first = int(counter(llm, "vllm:graft_tree_steps")) - before
        verified, _ = counts(llm)
        assert not differing(answer_all(llm, requests), right)
        second = int(counter(llm, "vllm:graft_tree_steps")) - before - first
        again, accepted = counts(llm)
        assert second < 0.7 * first, (first, second)
        assert again > verified
        assert accepted > TOKENS
        # Another tenant asks the same, and gets nothing of it.
        of_tenant = [salted(request, "ours") for request in requests]
        assert not differing(answer_all(llm, of_tenant[:2]), right[:2])
        assert watch.drafted > 10
        assert watch.foreign == 0
        (info,) = llm.collective_rpc("graft_info")
        found = info["counters"]["tree"]["ngrams"]
        planned = {row.what: row.num_bytes for row in memory_of(llm.llm_engine.vllm_config)[0]}
        # Negative control: with scopes ignored the tenants' texts are drafted for each other.
        told = Owners.of
        monkeypatch.setattr(Owners, "of", lambda *args: told(*args)._replace(scope=9))
        for asked in (of_tenant, requests):
            assert not differing(answer_all(llm, asked), right)
        assert watch.foreign > 3
    assert found["memory"]["segments_written"] > found["memory"]["segments"]
    assert planned["texts of other requests"] == found["memory"]["bytes"] == SMALL["bytes"]
    assert planned["texts of the requests"] == found["bytes"]


def test_a_draft_is_joined_by_the_memory(
    pair: Pair, requests: list[Request], right: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch)
    tree = {"ngram": True, "memory": {"bytes": "1MiB", "scope": "server"}}
    with pair.engine(nodes=15, topk=4, steps=3, tree=tree, **CROWDED) as llm:
        assert not differing(answer_all(llm, requests), right)
        first = counter(llm, "vllm:graft_tree_steps")
        assert not differing(answer_all(llm, requests), right)
        assert counter(llm, "vllm:graft_tree_steps") - first < 0.8 * first
        verified, accepted = counts(llm)
        assert verified > accepted > 5
    assert watch.drafted > 10
    assert watch.foreign == 0
