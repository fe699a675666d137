"""Real engines whose draft predicts a whole block of positions in one pass."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.answers.text_requests import shortened
from tests.support.engines import block_engines
from tests.support.engines.block_engines import FROM_LAST, GREEDY, SEEDED, TEXTS, block_engine
from tests.support.engines.pairs import (
    Answer,
    Pair,
    Request,
    answer_all,
    counter,
    crowded,
    differing,
    scheduling,
)
from tests.support.models.block_drafts import (
    write_block_target,
    write_dflash,
    write_dflash2,
    write_dspark,
    write_lilicorr,
)
from tests.support.references.block_reference import compared
from tests.support.watches import emitted
from vllm_graft.plan.memory import memory_of
from vllm_graft.spec_decode.drafters.block.block_trees import BlockTrees
from vllm_graft.spec_decode.drafters.step_costs import measure_step_costs
from vllm_graft.spec_decode.targets.dense import layer as dense_layer
from vllm_graft.spec_decode.verification.context import AcceptedRows
from vllm_graft.testing import model_runner, spec_metrics

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

# A fixture, which pytest finds by this name.
alone = block_engines.alone
METHODS = dict.fromkeys(("dflash", "dflash2", "lilicorr"), "dflash")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target and one draft of each kind. That of DSpark errs by its states alone."""
    folder = tmp_path_factory.mktemp("blocks")
    write_block_target(folder / "target", from_last=FROM_LAST)
    write_dflash(folder / "dflash", error=0.1)
    write_dflash2(folder / "dflash2", from_last=FROM_LAST, error=0.1)
    write_lilicorr(folder / "lilicorr")
    write_dspark(folder / "dspark", from_last=FROM_LAST, error=0.6)
    write_dspark(folder / "perfect", from_last=FROM_LAST)
    write_dspark(folder / "fill_in", from_last=FROM_LAST, from_anchor=False)
    return folder


def engine(folder: Path, draft: str, **options: Any) -> contextlib.AbstractContextManager[Any]:
    return block_engine(folder, draft, METHODS.get(draft, "dspark"), **options)


@pytest.mark.parametrize(
    ("draft", "drafter", "nodes", "steps"),
    [
        ("dflash", "DFlashTrees", 24, 6),
        ("dflash2", "DFlash2Trees", 14, 5),
        ("lilicorr", "LiLiCorrTrees", 14, 5),
    ],
)
def test_trees_are_those_of_a_reference(
    folder: Path,
    alone: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
    draft: str,
    drafter: str,
    nodes: int,
    steps: int,
) -> None:
    """Answers are the target's, to seeded requests as well, which are drafted with its noise."""
    with engine(folder, draft, nodes=nodes, topk=4, steps=steps) as llm:
        with compared(monkeypatch) as seen:
            assert differing(answer_all(llm, GREEDY[:2]), alone[:2]) == []
        assert seen.trees >= 8
        assert seen.branching == seen.trees
        assert max(seen.depths) >= 3
        assert differing(answer_all(llm, SEEDED[:1]), alone[len(GREEDY) :][:1]) == []
        assert type(model_runner(llm).speculator).__name__ == drafter
        metrics = spec_metrics(llm)
        [info] = llm.collective_rpc("graft_info")
        planned = {row.what: row.num_bytes for row in memory_of(llm.llm_engine.vllm_config)[0]}
    assert metrics.accepted_per_position[0] > metrics.accepted_per_position[1] > 0
    counters = info["counters"]["tree"]
    assert set(counters["draft_launches"]) == {"uncaptured"}
    assert counters["level_bytes"] == planned["candidates of the tree"] > 0
    assert (counters["topk"], counters["steps"], counters["num_nodes"]) == (4, steps, nodes)


def test_dspark_s_trees_and_zero_drafts(
    folder: Path, alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of two requests get no drafts; what one drafts afterwards is as right as ever."""
    short = [shortened(GREEDY[0], 8), GREEDY[2]]
    options: dict[str, Any] = {"ranges": [(1, 1, 12), (2, 8, 0)]}
    with engine(folder, "perfect", nodes=12, topk=2, steps=8, **options) as llm:
        with compared(monkeypatch) as seen, emitted(llm) as found:
            first, second = answer_all(llm, short)
        assert first.tokens[0] == alone[0].tokens[0][:8]
        assert second == alone[2]
        assert seen.branching > 0
        assert differing(answer_all(llm, SEEDED[:1]), alone[len(GREEDY) :][:1]) == []
    first_steps, second_steps = found.values()
    assert first_steps == second_steps[:8] == [1] * 8
    assert max(second_steps) > 3


@pytest.mark.parametrize(
    ("draft", "rows"),
    [
        ("dspark", {2: {3}, 1: {6}}),
        pytest.param("dflash", {2: {4}, 1: {7}}, marks=pytest.mark.nightly),
    ],
)
def test_larger_batches_run_shorter_blocks(
    folder: Path,
    alone: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
    draft: str,
    rows: dict[int, set[int]],
) -> None:
    """Two requests get 3 nodes each, so 3 positions; one alone gets 12 nodes and all positions."""
    short = [shortened(GREEDY[0], 8), GREEDY[2]]
    options: dict[str, Any] = {"ranges": [(1, 1, 12), (2, 8, 3)]}
    with engine(folder, draft, nodes=12, topk=4, steps=6, **options) as llm:
        with compared(monkeypatch) as seen:
            first, second = answer_all(llm, short)
        assert (first.tokens[0], second) == (alone[0].tokens[0][:8], alone[2])
        assert seen.rows == rows
        assert seen.trees > 8
        # Sampled requests are drafted with the target's noise, by the row of their position.
        assert differing(answer_all(llm, SEEDED[:2]), alone[len(GREEDY) :][:2]) == []
        [info] = llm.collective_rpc("graft_info")
        with monkeypatch.context() as patch, compared(monkeypatch) as seen:
            patch.setattr(BlockTrees, "cuts_positions", False)
            assert differing(answer_all(llm, GREEDY[:2]), alone[:2]) == []
        # Answers and trees say nothing of it: the number of rows does.
        assert seen.rows[2] == rows[1]
        planned = {row.what: row.num_bytes for row in memory_of(llm.llm_engine.vllm_config)[0]}
    [few, many] = info["counters"]["tree"]["blocks"]
    assert (few["nodes"], few["topk"], few["positions"], few["batches"]) == (3, 3, 3, [2, 8])
    assert (many["nodes"], many["topk"], many["positions"], many["batches"]) == (12, 4, 6, [1, 1])
    counters = info["counters"]["tree"]
    assert 0 < counters["positions_drafted"] < counters["nodes_drafted"]
    assert counters["level_bytes"] == planned["candidates of the tree"]


@pytest.mark.parametrize("draft", ["perfect", pytest.param("dflash", marks=pytest.mark.nightly)])
def test_a_sampled_request_is_drafted_for_as_if_it_were_alone(
    folder: Path, alone: list[Answer], monkeypatch: pytest.MonkeyPatch, draft: str
) -> None:
    """The noise is that of the request's own draws, whoever is beside it in the batch."""
    expected = alone[len(GREEDY) :]

    def steps(requests: list[Request], answers: list[Answer]) -> list[list[int]]:
        with emitted(llm) as found:
            assert differing(answer_all(llm, requests), answers) == []
        return [found[name] for name in sorted(found, key=int)]

    with engine(folder, draft, nodes=12, topk=4, steps=5) as llm:
        together = steps(SEEDED, expected)
        metrics = spec_metrics(llm)
        one_by_one = [steps([SEEDED[row]], [expected[row]])[0] for row in range(len(SEEDED))]
        assert together == one_by_one
        if draft == "perfect":
            # What will be drawn is among the best by the draft's logits and the draw's noise.
            assert metrics.accepted_per_position[0] == metrics.drafts
        assert max(map(max, together)) > 2
        # Control: the positions of the batch's first request for all.
        draws = BlockTrees.draws
        monkeypatch.setattr(
            BlockTrees,
            "draws",
            lambda drafter, num_reqs: draws(drafter, num_reqs)[:1].repeat(num_reqs, 1),
        )
        wrong = steps(SEEDED, expected)
    assert sum(map(len, wrong)) > sum(map(len, together))


def test_convolutions_keep_the_whole_block(
    folder: Path, alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DFlash 2 tells positions by the length that it was loaded for: trees alone are shallower."""
    options: dict[str, Any] = {"ranges": [(1, 1, 12), (2, 8, 3)]}
    with engine(folder, "dflash2", nodes=12, topk=4, steps=6, **options) as llm:
        with compared(monkeypatch) as seen:
            assert differing(answer_all(llm, GREEDY[:2]), alone[:2]) == []
        assert seen.rows[2] == {7}
        assert max(seen.depths) <= 3


DFLASH2 = pytest.param("dflash2", marks=pytest.mark.nightly)
LILICORR = pytest.param("lilicorr", marks=pytest.mark.nightly)


@pytest.mark.parametrize("draft", ["dflash", DFLASH2, LILICORR, "dspark"])
def test_a_chain_is_accepted_as_stock_vllm_s(folder: Path, alone: list[Answer], draft: str) -> None:
    """Step by step: a wrong row, state or position of the context would change what is drafted."""
    steps = []
    for options in ({"chain": 5}, {"nodes": 5, "topk": 1, "steps": 5}):
        with engine(folder, draft, **options) as llm, emitted(llm) as found:
            assert differing(answer_all(llm, GREEDY[:2]), alone[:2]) == []
            steps.append(dict(found))
    assert steps[0] == steps[1]
    lengths = {length for each in steps[0].values() for length in each[1:-1]}
    assert 1 in lengths
    assert len(lengths) > 1


@pytest.mark.parametrize("draft", ["perfect", "fill_in"])
def test_a_perfect_chain_is_accepted_to_its_end(
    folder: Path, alone: list[Answer], draft: str
) -> None:
    """A block is read to its last position, whether or not the last token's own predicts."""
    with engine(folder, draft, nodes=8, topk=1, steps=8) as llm, emitted(llm) as found:
        assert differing(answer_all(llm, GREEDY), alone[: len(GREEDY)]) == []
    # One token of the prompt's step, then eight drafts and the bonus token.
    assert set(map(tuple, found.values())) == {(1, 9, 9)}


@pytest.mark.parametrize("draft", ["perfect", pytest.param("fill_in", marks=pytest.mark.nightly)])
def test_a_perfect_chain_is_accepted_to_the_end_of_a_shorter_block(
    folder: Path, alone: list[Answer], draft: str
) -> None:
    """The last position of a shortened block is read, and none behind it is drafted."""
    options: dict[str, Any] = {"ranges": [(1, 1, 8), (2, 8, 3)]}
    with engine(folder, draft, nodes=8, topk=1, steps=8, **options) as llm:
        with emitted(llm) as found:
            assert differing(answer_all(llm, GREEDY[:2]), alone[:2]) == []
        assert set(map(tuple, found.values())) == {(1, 4, 4, 4, 4, 4)}
        with emitted(llm) as found:
            assert differing(answer_all(llm, GREEDY[:1]), alone[:1]) == []
        assert set(map(tuple, found.values())) == {(1, 9, 9)}


@pytest.mark.nightly
def test_answers_hold_when_crowded(folder: Path, alone: list[Answer]) -> None:
    """Chunked prompts beside trees, prefix caching, preemption and n-grams, all at once."""
    few = crowded(blocks=6, max_model_len=128, tree={"ngram": True})
    with engine(folder, "dspark", nodes=10, topk=3, steps=6, **few) as llm, scheduling(llm) as seen:
        assert differing(answer_all(llm, GREEDY + SEEDED[:2]), alone[:-1]) == []
        assert seen.chunks_beside_drafts > 0
        assert seen.preempted > 0
        assert differing(answer_all(llm, GREEDY[1:2]), alone[1:2]) == []
        assert counter(llm, "vllm:prefix_cache_hits") > 0
        assert spec_metrics(llm).accepted_per_position[1] > 0


def test_spoiled_rows_and_cache_are_seen(
    folder: Path, alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls: each thing that follows the accepted path is left out in turn."""
    requests, expected = GREEDY[:2], alone[:2]
    with engine(folder, "perfect", nodes=12, topk=2, steps=8) as llm:
        with emitted(llm) as right:
            assert differing(answer_all(llm, requests), expected) == []
        with monkeypatch.context() as patch, emitted(llm) as wrong:
            # The draft's context is of the rows as they were verified: answers stay right.
            patch.setattr(AcceptedRows, "move", lambda rows, context, *given: given[:2])
            assert differing(answer_all(llm, requests), expected) == []
        steps = [sum(map(len, found.values())) for found in (right, wrong)]
        assert steps[1] > 1.2 * steps[0]
        # The target's K/V stays where the tree left it: they do not.
        monkeypatch.setattr(dense_layer, "compact_kv", lambda *args, **kwargs: None)
        assert differing(answer_all(llm, requests), expected) != []


def test_steps_change_the_block_between_graphs(
    folder: Path, alone: list[Answer], tmp_path: Path
) -> None:
    """Steps that verify more than they draft store K/V of the rows that their graph leaves out."""
    write_dspark(tmp_path / "causal", from_last=FROM_LAST, causal=True)
    lengths = [12, 19, 19]
    requests = list(map(shortened, GREEDY, lengths))
    options: dict[str, Any] = {"graphs": [2, 4, 8, 16], "max_num_seqs": 2, "attention": "triton"}
    options["ranges"] = [(1, 1, 7), (2, 2, 3)]
    pair = Pair(str(folder / "target"), str(tmp_path / "causal"), TEXTS)
    with pair.engine(method="dspark", nodes=7, topk=1, steps=7, **options) as llm:
        with emitted(llm) as found:
            answers = answer_all(llm, requests)
        for answer, whole, length in zip(answers, alone, lengths):
            assert answer.tokens[0] == whole.tokens[0][:length]
        [info] = llm.collective_rpc("graft_info")
        [few, many] = info["counters"]["tree"]["blocks"]
        assert (few["graphs"], many["graphs"]) == ([1, 2], [1])
        assert info["counters"]["tree"]["draft_replays"] > 4
        steps = [count for each in found.values() for count in each[1:]]
        assert {4, 8} <= set(steps) <= {4, 8}
        with pytest.MonkeyPatch.context() as patch, emitted(llm) as found:
            # Control: without the rows that a graph leaves out, drafts are worse.
            patch.setattr(BlockTrees, "_precompute_context_kv", lambda *args, **kwargs: None)
            assert differing(answer_all(llm, GREEDY[:2]), alone[:2]) == []
        assert {count for each in found.values() for count in each[1:]} - {4, 8}


def test_graphs_hold_the_block_and_its_tree(
    folder: Path, alone: list[Answer], tmp_path: Path
) -> None:
    """Recorded FULL graphs, whose trees the engine cuts to what it finds to pay."""
    write_dspark(tmp_path / "causal", from_last=FROM_LAST, causal=True)
    requests = [shortened(each, 8) for each in GREEDY[:2]]
    options: dict[str, Any] = {"graphs": [4, 8, 16], "max_num_seqs": 2, "attention": "triton"}
    pair = Pair(str(folder / "target"), str(tmp_path / "causal"), TEXTS)
    with pair.engine(method="dspark", nodes=7, steps=4, tree={"shape": "auto"}, **options) as llm:
        found = [answer.tokens[0] for answer in answer_all(llm, requests)]
        assert found == [answer.tokens[0][:8] for answer in alone[:2]]
        speculator = model_runner(llm).speculator
        graphs = speculator.draft_graphs()
        assert sum(graph.replays for graph in graphs) > 0
        graphs_of = {
            plan.shape.num_nodes: speculator.block_graphs(plan).graphs
            for plan in speculator.trees.plans.values()
        }
        for graphs in graphs_of.values():
            assert sorted(desc.num_reqs for desc in graphs) == [1, 2]
        [info] = llm.collective_rpc("graft_info")
        # On a GPU the engine measures before it serves; a CPU's graphs are captured too late.
        costs, hot = measure_step_costs(SimpleNamespace(model_runner=model_runner(llm)), 1)
        del graphs, graphs_of, speculator
    assert set(costs) == {6, 7}
    assert not hot, "a block has no learned vocabulary"
    assert info["counters"]["tree"]["draft_replays"] > 0
    assert info["counters"]["tree"]["draft_graphs"] == 4
    assert [each["graphs"] for each in info["counters"]["tree"]["blocks"]] == [[1, 2], [1, 2]]
    assert {each["num_nodes"] for each in info["counters"]["tree"]["shapes"]} == {6, 7}
