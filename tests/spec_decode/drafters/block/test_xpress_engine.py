"""Real engines whose draft refines a block: an XPress, which is a stand-in of ours under 0.32."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.answers.text_requests import shortened
from tests.support.engines import block_engines
from tests.support.engines.block_engines import FROM_LAST, GREEDY, SEEDED, TEXTS, block_engine
from tests.support.engines.pairs import Answer, Pair, answer_all, differing
from tests.support.models.block_drafts import write_block_target, write_xpress
from tests.support.references.block_reference import compared
from tests.support.watches import emitted
from tests.support.worlds.xpress_world import xpress_world
from vllm_graft.spec_decode.drafters.block.refined import Refiner
from vllm_graft.testing import model_runner, spec_metrics

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

# A fixture, which pytest finds by this name.
alone = block_engines.alone


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with xpress_world():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target, a perfect draft, and one that errs and narrows its candidates."""
    folder = tmp_path_factory.mktemp("xpress")
    write_block_target(folder / "target", from_last=FROM_LAST)
    write_xpress(folder / "perfect", from_last=FROM_LAST)
    write_xpress(folder / "errs", from_last=FROM_LAST, error=0.6, topc=40)
    return folder


def engine(folder: Path, draft: str, **options: Any) -> Any:
    return block_engine(folder, draft, "dflash", **options)


def test_trees_are_those_of_a_reference(
    folder: Path, alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests get few nodes, one alone gets many: every pass is over the whole block."""
    short = [shortened(GREEDY[0], 8), GREEDY[2]]
    options: dict[str, Any] = {"ranges": [(1, 1, 24), (2, 8, 3)]}
    with engine(folder, "errs", nodes=24, topk=4, steps=6, **options) as llm:
        with compared(monkeypatch) as seen:
            first, second = answer_all(llm, short)
        assert (first.tokens[0], second) == (alone[0].tokens[0][:8], alone[2])
        assert seen.rows == {2: {9}, 1: {9}}
        assert seen.trees > 8
        assert seen.branching > 0
        assert max(seen.depths) >= 3
        assert differing(answer_all(llm, SEEDED[:2]), alone[len(GREEDY) :][:2]) == []
        assert type(model_runner(llm).speculator).__name__ == "XPressTrees"
        metrics = spec_metrics(llm)
        [info] = llm.collective_rpc("graft_info")
    assert metrics.accepted_per_position[0] > metrics.accepted_per_position[1] > 0
    [few, many] = info["counters"]["tree"]["blocks"]
    assert (few["nodes"], few["topk"], few["positions"]) == (3, 3, 8)
    assert (many["nodes"], many["topk"], many["positions"]) == (24, 4, 8)


def test_a_perfect_chain_is_accepted_to_its_end(
    folder: Path, alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last position is read, and sampled requests are drafted with their draws' noise."""
    with engine(folder, "perfect", nodes=8, topk=1, steps=8) as llm:
        with emitted(llm) as found:
            assert differing(answer_all(llm, GREEDY), alone[: len(GREEDY)]) == []
        # One token of the prompt's step, then eight drafts and the bonus token.
        assert set(map(tuple, found.values())) == {(1, 9, 9)}
        with emitted(llm) as found:
            assert differing(answer_all(llm, SEEDED), alone[len(GREEDY) :]) == []
        assert max(map(max, found.values())) > 5
        # Control: each place of the block behind the token of the one before.
        row = Refiner.row
        monkeypatch.setattr(Refiner, "row", lambda r, place, before: row(r, place, before * 0))
        with emitted(llm) as wrong:
            assert differing(answer_all(llm, GREEDY), alone[: len(GREEDY)]) == []
        assert sum(map(len, wrong.values())) > 9


def test_fewer_nodes_than_positions(folder: Path, alone: list[Answer]) -> None:
    """The block ends where vLLM has no slots for it, and the FP8 head draws its logits."""
    tree = {"head_dtype": "fp8"}
    with engine(folder, "perfect", nodes=5, topk=2, steps=3, tree=tree) as llm:
        assert differing(answer_all(llm, GREEDY[:2]), alone[:2]) == []
        metrics = spec_metrics(llm)
        [info] = llm.collective_rpc("graft_info")
    [block] = info["counters"]["tree"]["blocks"]
    assert block["positions"] == 5
    assert info["counters"]["tree"]["fp8_head_bytes"] > 0
    assert metrics.accepted_per_position[0] > 0.8 * metrics.drafts


@pytest.mark.nightly
def test_graphs_draft_what_launches_draft(
    folder: Path, alone: list[Answer], tmp_path: Path
) -> None:
    """Recorded FULL graphs of a step hold the refiner's levels; as much is accepted as without."""
    write_xpress(tmp_path / "causal", from_last=FROM_LAST, error=0.3, causal=True, topc=60)
    pair = Pair(str(folder / "target"), str(tmp_path / "causal"), TEXTS)
    options: dict[str, Any] = {"max_num_seqs": 2, "attention": "triton"}
    steps = []
    for graphs in ([13, 26], None):
        more = options | ({"graphs": graphs} if graphs else {})
        with pair.engine(method="dflash", nodes=12, topk=3, steps=5, **more) as llm:
            with emitted(llm) as found:
                assert differing(answer_all(llm, GREEDY[:2]), alone[:2]) == []
            steps.append(sorted(map(tuple, found.values())))
            [info] = llm.collective_rpc("graft_info")
        assert (info["counters"]["tree"]["draft_replays"] > 0) is bool(graphs)
    assert steps[0] == steps[1]
    assert max(map(max, steps[0])) > 3
