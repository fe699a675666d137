"""Real engines: a KV connector beside trees is offered K/V of accepted tokens, and no other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engines import cache_engines
from tests.support.engines.pairs import Answer, Pair, Request, answer_all, counter, differing
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


def test_stock_s_chain_counts_drafts_too(pair: Pair, stopping: list[Request]) -> None:
    """What `docs/upstream_issues.md` says of connectors beside stock's drafts."""
    kind = WatchingConnector
    with pair.engine(chain=3, enable_prefix_caching=False, **watched(kind)) as llm:
        for each in stopping:
            answer_all(llm, [each])
    assert any(told.tokens > told.known for told in kind.told)
    assert any(told.tokens >= told.known for told in kind.ends)


def test_without_ours_layers_are_saved_before_the_path_moves(
    pair: Pair, samples: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: within the pass accepted rows are where their nodes are."""
    monkeypatch.setattr(tree_part, "hold_saves", lambda worker: None)
    ask(pair, MirroringConnector, samples[:2])
    assert sum(MirroringConnector.wrong.values()) > 20


EXAMPLE = "ExampleConnector"
FOREIGN = "vllm:external_prefix_cache_hits"


def shelf(folder: Path, *, ours: bool = False) -> dict[str, Any]:
    """Configure a connector that keeps prompts' K/V in files, by layer; ours stands before it."""
    extra = {"shared_storage_path": str(folder)}
    example = {"kv_connector": EXAMPLE, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    if not ours:
        return example
    children = {"connectors": [cache_engines.transfer(load="async"), example]}
    multi = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    return {**multi, "kv_connector_extra_config": children}


class Asked:
    """An engine that was asked, with its acceptance length and the tokens that it did not compute.

    It is asked again after a reset if `again`.
    """

    def __init__(
        self, pair: Pair, asked: list[Request], transfer: dict[str, Any], again: bool = False
    ) -> None:
        with pair.engine(nodes=15, kv_transfer_config=transfer, max_num_batched_tokens=256) as llm:
            self.answers = answer_all(llm, asked)
            self.length = spec_metrics(llm).acceptance_length
            self.foreign = counter(llm, FOREIGN)
            if again:
                assert llm.reset_prefix_cache()
                self.answers += answer_all(llm, asked)
                self.from_ours = cache_engines.metrics(llm)["hit_tokens_host"]


@pytest.fixture
def long(samples: list[Request], expected: list[Answer]) -> tuple[list[Request], list[Answer]]:
    """Requests with more than a block of prompt, and their answers."""
    return samples[::4], expected[::4]


@pytest.mark.parametrize("ours", [False, True], ids=["alone", "beside_ours"])
def test_k_v_that_another_engine_saved(
    pair: Pair, long: tuple[list[Request], list[Answer]], tmp_path: Path, ours: bool
) -> None:
    """The draft's K/V travels with the target's, so that as many drafts are accepted."""
    asked, expected = long
    transfer = shelf(tmp_path, ours=ours)
    saved = Asked(pair, asked, transfer, again=ours)
    loaded = Asked(pair, asked, transfer)
    assert not differing(saved.answers, expected * (1 + ours))
    assert not differing(loaded.answers, expected)
    assert saved.foreign == 0 < loaded.foreign
    assert loaded.length == pytest.approx(saved.length, rel=0.02)
    assert not ours or saved.from_ours > 0


def test_a_draft_without_the_prompts_k_v_is_accepted_less(
    pair: Pair, long: tuple[list[Request], list[Answer]], tmp_path: Path
) -> None:
    """Negative control: the draft's K/V is lost on the way, which changes no answer."""
    asked, expected = long
    saved = Asked(pair, asked, shelf(tmp_path))
    files = sorted(tmp_path.glob("*/*.safetensors"))
    [draft] = {path.name for path in files} - {
        f"model.layers.{layer}.self_attn.attn.safetensors" for layer in range(6)
    }
    for path in files:
        if path.name == draft:
            save_file({k: torch.zeros_like(v) for k, v in load_file(path).items()}, path)
    loaded = Asked(pair, asked, shelf(tmp_path))
    assert not differing(loaded.answers, expected)
    assert loaded.length < 0.98 * saved.length
