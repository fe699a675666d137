"""Engines with a standalone draft model: graphs give the same drafts as vLLM's launches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.support.answers.dashboard import without_data
from tests.support.answers.metrics_page import metrics_page
from tests.support.checkpoints import write_likeness
from tests.support.engines.pairs import Pair
from vllm_graft.metrics.server_info import total
from vllm_graft.testing import TinyShape, model_runner, spec_metrics, write_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

STEPS = 4
SIZES = [1, 2, 4]
WIDE_SIZES = [12, 24]
"""Sizes in rows: the target has five per request, the draft's first pass six."""
BATCHES = (1, 3, 5)
"""One is a graph's own size, one is padded, and one is too large for any graph."""
TOKENS = 7


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root: Path = tmp_path_factory.mktemp("models")
    target = write_llama(root / "target", TinyShape(num_layers=2, hidden_size=32))
    return Pair(str(target), str(write_likeness(target, root / "draft")), [])


def engine(models: Pair, graft: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
    return models.engine(
        method="draft_model",
        chain=STEPS,
        speculative={"draft_sample_method": "probabilistic"},
        # Both engines replay the target's graphs: they differ in the draft's alone.
        graphs=SIZES + WIDE_SIZES,
        max_num_seqs=max(BATCHES),
        enable_prefix_caching=False,
        additional_config={"graft": graft} if graft else {},
    )


def ask(llm: Any, batch: int, sampled: bool = True) -> list[list[int]]:
    """Generate for prompts of different lengths, every other one sampled with a seed."""
    params = [
        SamplingParams(
            temperature=0.8 if sampled and i % 2 else 0, seed=i, max_tokens=TOKENS, ignore_eos=True
        )
        for i in range(batch)
    ]
    prompts = [{"prompt_token_ids": list(range(7 + i, 16 + 4 * i))} for i in range(batch)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@dataclass
class Seen:
    """An engine's answers, and how far its drafts were accepted."""

    answers: list[list[list[int]]]
    drafted: int
    accepted: list[int]

    @classmethod
    def of(cls, llm: Any) -> Seen:
        answers = [ask(llm, batch) for batch in BATCHES]
        metrics = spec_metrics(llm)
        return cls(answers, metrics.draft_tokens, metrics.accepted_per_position)


@pytest.fixture(scope="module")
def stock(models: Pair) -> Seen:
    with engine(models, {}) as llm:
        kind = type(model_runner(llm).speculator)
        assert kind.__module__.startswith("vllm.")
        return Seen.of(llm)


@dataclass
class Running:
    llm: Any
    seen: Seen
    report: dict[str, Any]
    page: str


@pytest.fixture(scope="module")
def ours(models: Pair, stock: Seen) -> Iterator[Running]:
    with engine(models, {"draft": {}}) as llm:
        seen = Seen.of(llm)
        [told] = llm.collective_rpc("graft_info")
        assert told["seams"] == {}
        running = Running(llm, seen, told["counters"]["draft"], metrics_page())
        yield running
        running.llm = None


def speculator(running: Running) -> Any:
    return model_runner(running.llm).speculator


def test_tokens_and_drafts_are_those_of_stock(stock: Seen, ours: Running) -> None:
    assert ours.seen == stock
    # The draft is not always right, so lengths and slots of rejected drafts matter.
    assert 0 < sum(stock.accepted) < stock.drafted


def test_each_batch_ran_as_it_should(ours: Running) -> None:
    report = ours.report
    assert (report["steps"], report["graphs"]) == (STEPS, sorted(SIZES, reverse=True))
    assert report["extend_graphs"] == report["graphs"]
    assert report["replays"] > report["extend_replays"] > 0
    # Prompts and the batch that is too large are launched.
    assert report["extend_launched"] > report["too_large"]
    assert 0 < report["padding_rows"] <= report["replays"]
    assert report["too_large"] > 0
    assert report["uncaptured"] == 0


def test_the_page_of_metrics_says_the_same(ours: Running) -> None:
    report, page, name = ours.report, ours.page, "vllm:graft_draft_"
    assert without_data(page, "", "draft") == []
    assert total(page, f"{name}loop_replays_total") == report["replays"]
    assert total(page, f"{name}loop_launches_total", reason="no_fit") == report["too_large"]
    assert total(page, f"{name}first_pass_replays_total") == report["extend_replays"]
    assert total(page, f"{name}first_pass_launches_total") == report["extend_launched"]
    assert total(page, f"{name}padding_requests_total") == report["padding_rows"]
    assert total(page, f"{name}graphs", of="loop") == len(SIZES)


def test_memory_profiling_finds_the_graphs(ours: Running) -> None:
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    held = [v for v in vars(speculator(ours)).values() if isinstance(v, CudaGraphManager)]
    chain = speculator(ours)
    assert set(held) == {chain.chain_runner, chain.extend_runner}


def owned_blocks(chain: Any) -> set[int]:
    """Return the blocks of the K/V cache that the requests of a step own."""
    tables = chain.block_tables
    return {
        int(block)
        for row in chain.idx_mapping[chain.idx_mapping >= 0].tolist()
        for block in tables.block_tables[0].gpu[row, : int(tables.num_blocks.np[0, row])]
    }


@pytest.mark.parametrize(("which", "width"), [("chain_runner", 1), ("extend_runner", STEPS + 2)])
def test_padding_touches_no_kv(
    ours: Running, monkeypatch: pytest.MonkeyPatch, which: str, width: int
) -> None:
    """A padded replay writes to slots of its requests alone."""
    chain = speculator(ours)
    layers = chain.vllm_config.compilation_config.static_forward_context
    caches = [layers[name].kv_cache for name in sorted(chain.draft_attn_layer_names)]
    runner = getattr(chain, which)
    replay = runner.run_fullgraph
    padded = []

    def watched(desc: Any) -> None:
        real = int((chain.idx_mapping >= 0).sum())
        before = [cache.clone() for cache in caches]
        replay(desc)
        mapped = chain.block_tables.slot_mappings if width == 1 else chain.expanded_slot_mappings
        slots = mapped[0, : desc.num_tokens]
        assert desc.num_tokens == desc.num_reqs * width
        assert bool((slots[: real * width] >= 0).all())
        assert bool((slots[real * width :] == -1).all())
        for old, new in zip(before, caches, strict=True):
            blocks = torch.nonzero((old != new).flatten(1).any(1)).flatten().tolist()
            assert blocks
            assert set(blocks) <= owned_blocks(chain)
        padded.append(desc.num_reqs - real)

    monkeypatch.setattr(runner, "run_fullgraph", watched)
    assert ask(ours.llm, 3) == ours.seen.answers[1]
    assert max(padded) > 0


def accepted(llm: Any, batch: int) -> tuple[list[list[int]], int]:
    """Return greedy answers, and how many drafts were accepted for them."""
    before = spec_metrics(llm).accepted_tokens
    answers = ask(llm, batch, sampled=False)
    return answers, spec_metrics(llm).accepted_tokens - before


@pytest.mark.parametrize("which", ["chain_inputs", "extend_inputs"])
def test_stale_inputs_draft_worse(
    ours: Running, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """Negative control: with graphs that never see a step's batch, only the drafts get worse."""
    answers, good = accepted(ours.llm, 2)
    monkeypatch.setattr(getattr(speculator(ours), which), "load", lambda *args: None)
    stale, bad = accepted(ours.llm, 2)
    assert stale == answers
    assert bad < good


def test_without_graphs_the_loop_is_vllm_s(ours: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the state between memory profiling and capture."""
    chain = speculator(ours)
    expected = accepted(ours.llm, 2)
    replays = chain.counters.replays
    monkeypatch.setattr(chain, "chain_runner", None)
    monkeypatch.setattr(chain, "extend_runner", None)
    assert accepted(ours.llm, 2) == expected
    assert chain.counters.uncaptured > 0
    assert chain.counters.replays == replays
