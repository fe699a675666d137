"""Real engines whose n-grams are found in other requests' texts too."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.answers.text_requests import in_pairs
from tests.support.engines.pairs import (
    Answer,
    Pair,
    Request,
    answer_all,
    counter,
    crowded,
    differing,
)
from vllm_graft.plan.memory import memory_of
from vllm_graft.spec_decode.lookup import ngrams
from vllm_graft.spec_decode.lookup.served_references import Owners
from vllm_graft.spec_decode.trees.text_state import MAX_PLACE, Owner, bytes_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TOKENS, REQUESTS = 20, 3
SMALL = {"bytes": bytes_of(2 * REQUESTS, REQUESTS)}


@pytest.fixture(scope="module")
def requests(pair: Pair) -> list[Request]:
    """Greedy and seeded ones; their prompts repeat nothing."""
    return in_pairs(TOKENS, pair.prompts[:2], temperature=0.5)


@pytest.fixture(scope="module")
def right(pair: Pair, requests: list[Request]) -> list[Answer]:
    with pair.engine() as llm:
        return answer_all(llm, requests)


def salted(request: Request, salt: str) -> Request:
    prompt: Any = {"prompt": request.prompt, "cache_salt": salt}
    return dataclasses.replace(request, prompt=prompt)


class Watch:
    """Looks up whose texts are drafted, in the memory itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drafted = self.foreign = self.of_corpora = 0
        self.tenants: dict[int, str | None] = {}
        self.salts: list[str | None] = []
        self.corpora: dict[int, str | None] = {}
        search, write, of, scope = (
            ngrams.search_memory, ngrams.write_corpus, Owners.of, Owners.scope,
        )  # fmt: skip

        def watched(state: Any, lengths: Any, slots: Any, num_reqs: int) -> None:
            search(state, lengths, slots, num_reqs)
            for row, slot in enumerate(slots.tolist()[:num_reqs]):
                for key in filter(None, state.keys[row].tolist()):
                    place = (key % MAX_PLACE + 1 - state.history.shape[1]) // 64
                    if place < 0:
                        continue
                    mine = self.tenants[int(state.memory.owners[slot, 1])]
                    corpus = place - state.memory.size
                    if corpus < 0:
                        theirs = self.tenants[int(state.memory.segments[place, 1])]
                    else:
                        theirs = self.corpora[corpus]
                    self.drafted += 1
                    self.of_corpora += corpus >= 0
                    self.foreign += theirs != mine

        def written(memory: Any, number: int, places: Any, *corpus: Any) -> None:
            self.corpora.update(dict.fromkeys(places, self.salts[-1]))
            write(memory, number, places, *corpus)

        def numbered(owners: Owners, salt: str | None, adapter: str | None) -> int:
            self.salts.append(salt)
            return scope(owners, salt, adapter)

        def told(owners: Owners, request: Any) -> Owner:
            owner = of(owners, request)
            # Prompts have numbers of their own in each tenant, also where scopes are ignored.
            self.tenants[owner.prompt] = request.cache_salt
            return owner

        monkeypatch.setattr(ngrams, "search_memory", watched)
        monkeypatch.setattr(ngrams, "write_corpus", written)
        monkeypatch.setattr(Owners, "of", told)
        monkeypatch.setattr(Owners, "scope", numbered)


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
    lengths = {"prompt_lookup_min": 3, "prompt_lookup_max": 8}
    options = crowded(REQUESTS, method="ngram_gpu", speculative=lengths, tree={"memory": SMALL})
    with pair.engine(nodes=15, steps=8, **options) as llm:
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
    pair: Pair, requests: list[Request], right: list[Answer]
) -> None:
    """Graphs of growing add and search; the first replay of each is compared with launches."""
    memory = {"bytes": "1MiB", "scope": "server"}
    tree = {"ngram": True, "memory": memory, "graph_runner": "verify"}
    graphs = [4, 8, 16]
    with pair.engine(
        nodes=15, topk=4, steps=3, tree=tree, graphs=graphs, **crowded(REQUESTS)
    ) as llm:
        assert not differing(answer_all(llm, requests), right)
        first = counter(llm, "vllm:graft_tree_steps")
        assert not differing(answer_all(llm, requests), right)
        assert counter(llm, "vllm:graft_tree_steps") - first < 0.8 * first
        verified, accepted = counts(llm)
        assert verified > accepted > 5
        (info,) = llm.collective_rpc("graft_info")
        assert counter(llm, "vllm:graft_tree_draft_replays") > 5
    assert info["counters"]["tree"]["draft_graphs_differing"] == {15: []}
    assert info["counters"]["tree"]["draft_graphs_verified"][15]


def swap_before_steps(llm: Any, texts: list[str]) -> list[int]:
    """Let a corpus have another text before each step, in turn; the list counts the swaps."""
    core = llm.llm_engine.engine_core.engine_core
    swaps, step = [0], core.step_fn

    def then_step(*args: Any, **kwargs: Any) -> Any:
        text = texts[swaps[0] % len(texts)]
        asked = {"drop": "swapped", "add": "swapped", "text": text, "salt": "swaps"}
        core.collective_rpc("graft_corpora", kwargs=asked)
        swaps[0] += 1
        return step(*args, **kwargs)

    core.step_fn = then_step
    return swaps


def test_corpora_are_swapped_while_it_serves(
    pair: Pair,
    requests: list[Request],
    right: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A file of the configuration, tenants' corpora, and one that changes before each step."""
    watch, known = Watch(monkeypatch), tmp_path / "known.jsonl"
    texts = [each.prompt + answer.texts[0] for each, answer in zip(requests, right, strict=True)]
    known.write_text(json.dumps(texts[0]))
    memory = {**SMALL, "corpora": [str(known)], "corpora_bytes": "1MiB"}
    tree = {"ngram": True, "memory": memory}

    def ask(llm: Any, **kwargs: Any) -> Any:
        (found,) = llm.collective_rpc("graft_corpora", kwargs=kwargs)
        return found

    with pair.engine(nodes=15, topk=4, steps=3, tree=tree, **crowded(REQUESTS)) as llm:
        assert [each["name"] for each in ask(llm)["corpora"]] == [str(known)]
        assert not differing(answer_all(llm, requests[:1]), right[:1])
        assert watch.of_corpora > 3
        ask(llm, add="theirs", text=texts[2], salt="theirs")
        for salt, found in (("ours", False), ("theirs", True)):
            before = watch.of_corpora
            assert not differing(answer_all(llm, [salted(requests[2], salt)]), right[2:3])
            assert (watch.of_corpora > before) == found
        ask(llm, add="swapped", text="", salt="swaps")
        swaps, before = (
            swap_before_steps(llm, [texts[0], texts[2], "", texts[3][::-1]]),
            watch.of_corpora,
        )
        asked = [salted(each, "swaps") for each in requests]
        assert not differing(answer_all(llm, asked), right)
        assert swaps[0] > 10
        assert watch.of_corpora > before + 3
        assert watch.foreign == 0
        # Negative control: with scopes ignored one's corpus is drafted for others.
        told, scope = Owners.of, Owners.scope
        monkeypatch.setattr(Owners, "of", lambda *args: told(*args)._replace(scope=9))
        monkeypatch.setattr(Owners, "scope", lambda *args: min(9, scope(*args)))
        assert not differing(answer_all(llm, [salted(requests[0], "ours")]), right[:1])
        assert watch.foreign > 0
        with pytest.raises(Exception, match="there is no corpus 'gone'"):
            ask(llm, drop="gone")
        (info,) = llm.collective_rpc("graft_info")
        planned = {row.what: row.num_bytes for row in memory_of(llm.llm_engine.vllm_config)[0]}
    assert (
        planned["texts of other requests"] == info["counters"]["tree"]["ngrams"]["memory"]["bytes"]
    )
