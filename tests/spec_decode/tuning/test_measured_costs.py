"""Costs of steps, measured at the start on recorded graphs, where figures mean nothing."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.engines.pairs import Pair, Request, answer_all
from vllm_graft.spec_decode import tree_part
from vllm_graft.spec_decode.chunking.graph_fit import ROWS, captured_rows
from vllm_graft.spec_decode.drafters import step_costs, tuner_seed
from vllm_graft.spec_decode.drafters.mtp import MtpTrees
from vllm_graft.spec_decode.drafters.step_costs import LentStates, draw_tokens
from vllm_graft.spec_decode.drafters.tree_drafting import TreeDrafting
from vllm_graft.spec_decode.trees.tree import TreeShape
from vllm_graft.spec_decode.tuning.step_times import MEASURED
from vllm_graft.spec_decode.verification.context import TreeContext
from vllm_graft.testing.engine import model_runner


def engine(*passes: list[Any], hot: list[Any] | None = None, **tree: Any) -> Any:
    """Make an engine core whose workers give these answers, the last ones over and over."""
    additional = {"graft": {"tree": tree}} if tree else {}
    config = SimpleNamespace(additional_config=additional, speculative_config=None)
    asked: list[int] = []
    told: list[Any] = []

    def answer(ask: Any, args: tuple[Any, ...]) -> list[Any]:
        if ask is tuner_seed.hot_gains:
            told.append(args)
            return [None]
        replays, seconds = args
        asked.append(replays)
        ranks = passes[min(len(asked), len(passes)) - 1]
        whole = hot or [{}] * len(ranks)
        return list(zip(ranks, whole, [seconds] * len(ranks), strict=True))

    return SimpleNamespace(vllm_config=config, collective_rpc=answer, asked=asked, told=told)


def test_the_slowest_rank_is_believed() -> None:
    ranks = [{0: {1: 0.005}, 3: {1: 0.008}}, {0: {1: 0.006}, 3: {1: 0.007}}]
    core = engine(ranks)
    assert tuner_seed.measure(core) == {0: {1: 0.006}, 3: {1: 0.008}}
    # Only one scheduler, that of this configuration, may take the costs.
    assert MEASURED.take(engine(ranks).vllm_config) is None
    assert MEASURED.take(core.vllm_config) == {0: {1: 0.006}, 3: {1: 0.008}}
    assert MEASURED.take(core.vllm_config) is None
    assert core.asked == [tuner_seed.REPLAYS, 1], "one more pass finds nothing shorter"


def test_data_parallel_ranks_return_the_slowest_one_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decides by what it is told whether to replay passes of all ranks once more."""
    costs = {0: {1: 0.005}}, {3: {1: 0.007}}
    others = {0: {1: 0.009}}, {3: {1: 0.002}}, 4.0
    monkeypatch.setattr(step_costs, "measure_step_costs", lambda worker, replays: costs)
    monkeypatch.setattr(tuner_seed, "gather_replicas", lambda own: [own, others])
    found = tuner_seed.step_costs(None, 3, 2.0)
    assert found == ({0: {1: 0.009}}, {3: {1: 0.007}}, 4.0)


def test_all_ranks_are_told_what_hot_tokens_save() -> None:
    """Ranks that timed differently still have to go the same way."""
    ranks = [{0: {1: 5.0}, 7: {1: 8.0, 4: 9.0}}, {0: {1: 5.0}, 7: {1: 7.0, 4: 9.0}}]
    core = engine(ranks, hot=[{7: {1: 6.0, 4: 8.9}}, {7: {1: 5.0, 4: 8.8}}])
    found = tuner_seed.measure(core)
    assert core.told == [({0: {1: 5.0}, 7: {1: 8.0, 4: 9.0}}, {7: {1: 6.0, 4: 8.9}})]
    # The scheduler gets the costs of what steps will draft from.
    assert found == {0: {1: 5.0}, 7: {1: 6.0, 4: 9.0}}
    assert MEASURED.take(core.vllm_config) == found
    assert not engine(ranks).told


def test_a_worker_uses_what_it_is_told() -> None:
    learned = SimpleNamespace(least=None)
    speculator = SimpleNamespace(head=SimpleNamespace(learned=learned))
    worker = SimpleNamespace(model_runner=SimpleNamespace(speculator=speculator))
    tuner_seed.hot_gains(worker, {7: {1: 8.0}}, {7: {1: 6.0}})
    least: Any = learned.least
    assert least(7, 1) == pytest.approx(0.9)


def test_passes_go_on_until_none_finds_a_size_shorter(caplog: pytest.LogCaptureFixture) -> None:
    """Another engine starts on the same GPU: what is measured meanwhile takes too long."""
    first = {1: {1: 0.005, 4: 0.0100}, 7: {1: 0.006, 4: 0.019}}
    second = {1: {1: 0.009, 4: 0.0055}, 7: {1: 0.012, 4: 0.011}}
    third = {1: {1: 0.005, 4: 0.0054}, 7: {1: 0.0059, 4: 0.008}}
    core = engine([first], [second], [third])
    found = tuner_seed.measure(core)
    assert found == {1: {1: 0.005, 4: 0.0054}, 7: {1: 0.0059, 4: 0.008}}
    assert core.asked == [3, 1, 1, 1]
    assert not caplog.records


def test_passes_end_on_a_gpu_that_is_never_free(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner_seed, "PATIENCE", -1.0)
    core = engine([{3: {1: 0.010}}], [{3: {1: 0.006}}])
    assert tuner_seed.measure(core) == {3: {1: 0.006}}
    assert core.asked == [3, 1]
    [record] = [each for each in caplog.records if each.levelname == "WARNING"]
    assert "found 1 sizes shorter by 10% or more" in record.message
    # Another data-parallel rank may have waited for longer.
    monkeypatch.undo()
    slow = engine([{3: {1: 0.010}}], [{3: {1: 0.006}}], [{3: {1: 0.001}}])
    answer = slow.collective_rpc
    slow.collective_rpc = lambda *asked, **args: [
        (*each[:2], 99.0) for each in answer(*asked, **args)
    ]
    assert tuner_seed.measure(slow) == {3: {1: 0.006}}
    # An engine that captured nothing is asked no more than twice.
    empty = engine([{}])
    assert tuner_seed.measure(empty) == {}
    assert len(empty.asked) == 2


@pytest.mark.parametrize(
    ("tree", "costs", "rows"),
    [
        ({}, 0, 0),
        ({"shape": "fixed"}, 0, 1),
        ({"shape": "auto"}, 2, 1),
        ({"shape": "auto", "fit_prompts": False}, 2, 0),
    ],
)
def test_workers_are_asked_what_the_section_needs(
    tree: dict[str, Any], costs: int, rows: int
) -> None:
    class EngineCore:
        def __init__(self) -> None:
            self.calls: list[Any] = []
            self.vllm_config = engine([], **tree).vllm_config

        def _initialize_kv_caches(self, vllm_config: Any) -> str:
            self.calls.append("captured")
            return "kv cache config"

        def collective_rpc(self, ask: Any, args: tuple[int, ...] = ()) -> list[Any]:
            self.calls.append(ask)
            return [({}, {}, 0.0)] if args else [512, 256]

    tree_part._hook_engine(SimpleNamespace(EngineCore=EngineCore))  # type: ignore[arg-type]
    core = EngineCore()
    assert core._initialize_kv_caches(core.vllm_config) == "kv cache config"
    asked = [*[tuner_seed.step_costs] * costs, *[captured_rows] * rows]
    assert core.calls == ["captured", *asked]
    # All ranks have to have a graph of so many rows.
    assert ROWS.take(core.vllm_config) == (256 if rows else None)


def test_each_row_has_a_token_of_its_own() -> None:
    """A mixture of experts would else read the same few experts for all rows."""
    ranks = [torch.zeros(64, dtype=torch.int32) for _ in range(2)]
    for tokens in ranks:
        draw_tokens(tokens[:60], 1000)
    assert torch.equal(*ranks)
    assert int(ranks[0].max()) < 1000
    assert len(set(ranks[0][:60].tolist())) > 50
    assert not ranks[0][60:].any()


@pytest.mark.parametrize("learns", [False, True])
def test_experts_compute_the_rows_that_are_timed(
    monkeypatch: pytest.MonkeyPatch, learns: bool
) -> None:
    """vLLM's routers send rows of padding to no expert, and captured inputs are all padding."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

    buffers = InputBuffers(4, 32, torch.device("cpu"))
    sizes = [
        SimpleNamespace(
            num_reqs=count,
            num_tokens=4 * count,
            uniform_token_count=4,
            cg_mode=CUDAGraphMode.FULL,
            num_active_loras=0,
        )
        for count in (1, 2)
    ]
    masks: dict[int, list[list[bool]]] = {}
    workspace: Any = None
    context = TreeContext.allocate(TreeShape(2, 2, 3), 4, 32, workspace, "cpu")
    seen: dict[int, tuple[list[int], list[int]]] = {}

    def pretend(runner: Any, tables: Any, desc: Any) -> None:
        InputBatch.make_dummy(desc.num_reqs, desc.num_tokens, buffers)
        assert buffers.is_padding[: desc.num_tokens].all(), "what the test is about"

    def run_fullgraph(desc: Any) -> torch.Tensor:
        masks.setdefault(desc.num_reqs, []).append(buffers.is_padding.tolist())
        rows = context.rows
        seen[desc.num_reqs] = rows.num_rows.tolist(), rows.row_masks[: desc.num_tokens].tolist()
        return torch.zeros(desc.num_tokens, 8)

    monkeypatch.setattr(step_costs, "_pretend", pretend)
    monkeypatch.setattr(step_costs, "draft_launches", lambda *_, narrow=False: [])
    runner = SimpleNamespace(
        input_buffers=buffers,
        block_tables=SimpleNamespace(get_dummy_block_tables=lambda num_reqs: ()),
        kv_cache_config=SimpleNamespace(num_blocks=9, kv_cache_groups=[]),
        device=torch.device("cpu"),
        model=SimpleNamespace(compute_logits=lambda hidden: hidden),
        model_config=SimpleNamespace(get_vocab_size=lambda: 1000),
    )
    speculator: Any = SimpleNamespace(
        input_buffers=None,
        context=context,
        trees=SimpleNamespace(narrow_plans={3: "plan"} if learns else {}),
        tell_requests_apart=lambda *_: None,
        treat_requests_alike=lambda: None,
    )
    buffers.is_padding.fill_(True)
    graphs = SimpleNamespace(graphs=sizes, run_fullgraph=run_fullgraph)
    whole, hot = step_costs._measure(runner, speculator, graphs, 2)
    assert set(whole[3]) == {1, 2}
    assert set(hot.get(3, ())) == ({1, 2} if learns else set())
    times = 4 if learns else 2
    assert masks[1] == [[False] * 4 + [True] * 28] * times
    # Attention computes these rows as well, each of which sees itself and those before it.
    assert seen == {1: ([4, 0, 0, 0], [1, 3, 7, 15]), 2: ([4, 4, 0, 0], [1, 3, 7, 15] * 2)}
    assert not context.rows.num_rows.any()
    assert masks[2] == [[False] * 8 + [True] * 24] * times


@pytest.mark.parametrize(("num_reqs", "lent"), [(2, [[1, 2, 3], [4, 5, 6]]), (3, None)])
def test_rows_that_are_timed_have_states(num_reqs: int, lent: list[list[int]] | None) -> None:
    """Recurrent layers compute nothing for the null block, which is what padding has."""
    tables = [torch.full((4, width), 5, dtype=torch.int32) for width in (7, 3)]

    def dummies(count: int) -> tuple[torch.Tensor, ...]:
        return tuple(table[:count].zero_() for table in tables)

    specs = [SimpleNamespace(block_size=16), SimpleNamespace(mamba_cache_mode="none")]
    config: Any = SimpleNamespace(
        num_blocks=8, kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    )
    stock: Any = SimpleNamespace(get_dummy_block_tables=dummies, cp_size=1)
    standing = LentStates(stock, config)
    attention, recurrent = standing.get_dummy_block_tables(num_reqs)
    assert attention.data_ptr() == tables[0].data_ptr()
    assert recurrent.data_ptr() == tables[1].data_ptr(), "the tensor that graphs read"
    assert not attention.any()
    assert recurrent.tolist() == (lent or [[1, 2, 3], [4, 5, 6], [7, 1, 2]])
    assert tables[1][num_reqs:].eq(5).all()
    assert standing.cp_size == 1, "all else is vLLM's"
    assert not stock.get_dummy_block_tables(num_reqs)[1].any()


def test_requests_are_told_apart_within_the_rows_of_a_pass() -> None:
    """Indices behind a pass's rows, left by a longer pass, would be read by a padded graph."""
    draft: Any = MtpTrees.__new__(MtpTrees)
    draft.first_pass_graph = lambda width: (None, width)
    draft.trees = SimpleNamespace(roots=SimpleNamespace(states=torch.zeros(6, 16)))
    draft.last_token_indices = torch.zeros(6, dtype=torch.int64)
    draft.hidden_states = torch.zeros(48, 16)
    draft.tell_requests_apart(4, nodes=7)
    assert draft.last_token_indices.tolist() == [7, 15, 23, 31, 0, 0]
    assert len(draft.hidden_states.unique(dim=0)) == 33, "32 rows, and zeros behind them"
    draft.tell_requests_apart(2, nodes=3)
    assert draft.last_token_indices.tolist() == [3, 7, 0, 0, 0, 0]
    draft.treat_requests_alike()
    assert not draft.last_token_indices.any()


def capture_contexts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the contexts, each with its stream, in which vLLM's managers capture."""
    from vllm.v1.worker.gpu import cudagraph_utils

    found: list[Any] = []
    stock = cudagraph_utils.graph_capture

    @contextlib.contextmanager
    def noted(**kwargs: Any) -> Iterator[Any]:
        with stock(**kwargs) as context:
            found.append(context)
            yield context

    monkeypatch.setattr(cudagraph_utils, "graph_capture", noted)
    return found


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(300)
def test_graphs_are_replayed_for_nobody(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every captured width is measured; no K/V is written, and answers stay the target's."""
    requests = [Request(pair.prompts[0], {"temperature": 0, "max_tokens": 6})]
    with pair.engine() as llm:
        expected = answer_all(llm, requests)
    sizes = [1, 2, 4, 8]
    contexts = capture_contexts(monkeypatch)
    with pair.engine(
        nodes=3,
        topk=2,
        steps=2,
        ranges=[(1, 1, 0), (2, 2, 3)],
        tree={"shape": "auto", "graph_runner": "verify"},
        max_num_seqs=2,
        attention="triton",
        graphs=sizes,
    ) as llm:
        target, extend, *levels = contexts
        assert levels
        assert all(each is extend is not target for each in levels), "one stream for the draft"
        core: Any = llm.llm_engine.engine_core
        tuner = core.engine_core.scheduler.dynamic_sd_lookup.tuner
        # The worker of a CPU captures nothing before the engine is built.
        assert tuner.costs == {}
        runner = model_runner(llm)
        before = [cache.clone() for cache in runner.kv_caches]
        drafted: list[torch.Tensor] = []
        attended: dict[int, set[tuple[int, ...]]] = {}
        forget, apart = TreeDrafting.treat_requests_alike, TreeDrafting.tell_requests_apart

        def noted(draft: Any) -> None:
            drafted.append(draft.first_level(2)[1].clone())
            forget(draft)

        def noted_rows(draft: Any, num_reqs: int, nodes: int) -> None:
            attended.setdefault(nodes, set()).add(tuple(draft.context.rows.num_rows.tolist()))
            apart(draft, num_reqs, nodes)

        monkeypatch.setattr(TreeDrafting, "treat_requests_alike", noted)
        monkeypatch.setattr(TreeDrafting, "tell_requests_apart", noted_rows)
        states = runner.cudagraph_manager.hidden_states
        with torch.inference_mode():
            states.fill_(float("nan"))
        tuner.seed(tuner_seed.measure(core.engine_core))
        # All 8 rows of the largest size are computed, and differ as their tokens do.
        assert len(states[:8].unique(dim=0)) == 8
        assert states[:8].isfinite().all()
        assert not runner.speculator.last_token_indices.any()
        # What the last replay of two requests drafted for them is not the same.
        assert any(not torch.equal(*each) for each in drafted)
        # The target's attention computes all rows of a size that is timed, and none of them later.
        assert attended == {0: {(1, 0), (1, 1)}, 3: {(4, 0), (4, 4)}}
        assert not runner.speculator.context.rows.num_rows.any()
        assert all(torch.equal(a, b) for a, b in zip(before, runner.kv_caches, strict=True))
        assert {nodes: list(costs) for nodes, costs in tuner.costs.items()} == {
            0: [1, 2],
            3: [1, 2],
        }
        assert all(cost > 0 for costs in tuner.costs.values() for cost in costs.values())
        del runner, before
        # Costs on a busy CPU may speak against speculation, so the number is fixed from here on.
        core.engine_core.scheduler.dynamic_sd_lookup = [3] * 3
        assert answer_all(llm, requests) == expected
        speculator = model_runner(llm).speculator
        assert speculator.report()["draft_graphs_verified"][3] == [1]
        assert speculator.report()["draft_graphs_differing"][3] == []
        # Negative control: the graph of two requests reads a tensor that is not written any more.
        roots = speculator.trees.roots
        roots.states = roots.states.clone()
        del speculator, roots
        assert answer_all(llm, requests * 2) == expected * 2
        report = model_runner(llm).speculator.report()
        assert report["draft_graphs_differing"][3] == [2]
