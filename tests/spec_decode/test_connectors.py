"""Real engines: a KV connector beside trees is offered K/V of accepted tokens, and no other."""

from typing import Any

import pytest

from tests.support.engines.pairs import Answer, Pair, Request, answer_all, differing
from tests.support.engines.watching_connector import MirroringConnector, WatchingConnector
from vllm_graft.spec_decode import tree_part
from vllm_graft.testing import spec_metrics

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def watched(kind: type[WatchingConnector]) -> dict[str, Any]:
    """Return options of an engine with such a connector."""
    kind.forget()
    transfer = {"kv_connector": kind.__name__, "kv_connector_module_path": kind.__module__}
    return {"kv_transfer_config": {**transfer, "kv_role": "kv_both"}, "max_num_seqs": 4}


def ask(
    pair: Pair, kind: type[WatchingConnector], asked: list[Request], **options: Any
) -> list[Answer]:
    """Ask an engine with such a connector, one request after the other."""
    options |= {"enable_prefix_caching": False, "max_num_batched_tokens": 64, **watched(kind)}
    with pair.engine(nodes=15, **options) as llm:
        answers = [answer for each in asked for answer in answer_all(llm, [each])]
        assert spec_metrics(llm).acceptance_length > 1.5
    return answers


@pytest.fixture(scope="module")
def stopping(samples: list[Request], expected: list[Answer]) -> list[Request]:
    """Requests that end at any token, also between drafts that are accepted together."""
    return [
        Request(each.prompt, {**each.params, "stop_token_ids": [answer.tokens[0][place]]})
        for each, answer in zip(samples[::2], expected[::2])
        for place in (4, 6, 7)
    ]


@pytest.mark.parametrize("kind", [WatchingConnector, MirroringConnector])
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_what_is_offered_was_accepted(
    pair: Pair,
    samples: list[Request],
    expected: list[Answer],
    stopping: list[Request],
    kind: type[WatchingConnector],
    ahead: bool,
) -> None:
    asked = [*samples[:4], *stopping[:6]]
    answers = ask(pair, kind, asked, async_scheduling=ahead)
    assert not differing(answers[:4], expected[:4])
    assert all(told.tokens <= told.known for told in kind.told)
    assert all(told.tokens < told.known for told in kind.ends)
    assert not kind.disagreed
    # The draft's layer is one of them.
    assert len(kind.right) > 2
    assert min(kind.right.values()) > 20 * len(asked)
    assert not kind.wrong


def test_without_ours_rows_of_drafts_are_counted(
    pair: Pair, samples: list[Request], stopping: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a connector is told what vLLM counts as computed."""
    monkeypatch.setattr(tree_part, "count_accepted", lambda scheduler: None)
    ask(pair, WatchingConnector, [*samples[:2], *stopping])
    assert any(told.tokens > told.known for told in WatchingConnector.told)
    assert any(told.tokens >= told.known for told in WatchingConnector.ends)
    assert WatchingConnector.disagreed
    assert sum(WatchingConnector.wrong.values()) > 20


def test_without_ours_layers_are_saved_before_the_path_moves(
    pair: Pair, samples: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: within the pass accepted rows are where their nodes are."""
    monkeypatch.setattr(tree_part, "hold_saves", lambda worker: None)
    ask(pair, MirroringConnector, samples[:2])
    assert sum(MirroringConnector.wrong.values()) > 20
