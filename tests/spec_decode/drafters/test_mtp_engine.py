"""Real engines whose target's own MTP module drafts trees."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.answers.text_requests import TEXTS, greedy, seeded
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
from tests.support.models.mtp_targets import write_glm4_moe, write_mimo
from tests.support.watches import emitted, narrowed
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.drafters.levels import LevelGrowth
from vllm_graft.spec_decode.targets.dense import layer as dense_layer
from vllm_graft.spec_decode.tree_part import TREES
from vllm_graft.spec_decode.trees.tree import TreeShape
from vllm_graft.spec_decode.tuning.tuner import NodeTuner
from vllm_graft.testing import model_runner, spec_metrics

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

TOKENS = 24
GREEDY = greedy(TOKENS)
SEEDED = seeded(TOKENS)
MTP: dict[str, Any] = {"method": "mtp"}


@pytest.fixture(scope="module")
def perfect(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target, and a module that predicts it without an error."""
    folder = str(write_mimo(tmp_path_factory.mktemp("perfect")))
    return Pair(folder, folder, TEXTS)


@pytest.fixture(scope="module")
def erring(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The same target, and a module that errs by the states that it is given."""
    folder = str(write_mimo(tmp_path_factory.mktemp("erring"), from_states=0.2))
    return Pair(folder, folder, TEXTS)


@pytest.fixture(scope="module")
def alone(perfect: Pair) -> list[Answer]:
    """What the target answers without drafts, to greedy and to seeded requests."""
    with perfect.engine() as llm:
        return answer_all(llm, GREEDY + SEEDED)


def test_answers_are_the_target_s(
    erring: Pair, alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with erring.engine(nodes=31, topk=8, steps=3, **MTP) as llm:
        assert differing(answer_all(llm, GREEDY + SEEDED), alone) == []
        metrics = spec_metrics(llm)
        assert type(model_runner(llm).speculator).__name__ == "MtpTrees"
        # Negative control: the accepted path's K/V stays where the tree left it.
        monkeypatch.setattr(dense_layer, "compact_kv", lambda *args, **kwargs: None)
        assert llm.reset_prefix_cache()
        assert differing(answer_all(llm, GREEDY[:2]), alone[:2]) != []
    # Some drafts at the third depth are right, and fewer than at the first.
    assert metrics.accepted_per_position[0] > metrics.accepted_per_position[2] > 0


@pytest.mark.nightly
def test_answers_hold_when_crowded(erring: Pair, alone: list[Answer]) -> None:
    """Chunked prompts beside trees, prefix caching and preemption, all at once."""
    with erring.engine(nodes=15, **MTP, **crowded(blocks=12)) as llm, scheduling(llm) as seen:
        assert differing(answer_all(llm, GREEDY + SEEDED), alone) == []
        assert seen.chunks_beside_drafts > 0
        assert seen.preempted > 0
        assert counter(llm, "vllm:prefix_cache_hits") > 0


def test_a_chain_is_accepted_as_stock_vllm_s(erring: Pair, alone: list[Answer]) -> None:
    """Step by step: a wrong row, state or position of the module would change what it drafts."""
    steps = []
    for options in ({"chain": 4}, {"nodes": 4, "topk": 1, "steps": 4}):
        with erring.engine(**MTP, **options) as llm, emitted(llm) as found:
            assert differing(answer_all(llm, GREEDY), alone[: len(GREEDY)]) == []
            steps.append(dict(found))
    assert steps[0] == steps[1]
    lengths = {length for each in steps[0].values() for length in each[1:-1]}
    assert {1, 2, 3} <= lengths


def test_a_perfect_chain_is_accepted_to_its_end(
    perfect: Pair, alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator

    calls: list[str] = []
    for owner, name in (
        (MTPSpeculator, "on_multi_step_decode_begin"),
        (LevelGrowth, "grow"),
        (MTPSpeculator, "on_multi_step_decode_end"),
    ):
        monkeypatch.setattr(owner, name, _noted(calls, name, getattr(owner, name)))
    with perfect.engine(nodes=5, topk=1, steps=5, **MTP) as llm:
        with emitted(llm) as found:
            assert differing(answer_all(llm, GREEDY), alone[: len(GREEDY)]) == []
        # One token of the prompt's step, then five drafts and the bonus token; the last is cut off.
        assert set(map(tuple, found.values())) == {(1, 6, 6, 6, 6)}
        assert len(calls) >= 12
        assert calls == ["on_multi_step_decode_begin", "grow", "on_multi_step_decode_end"] * (
            len(calls) // 3
        )
        # Negative control: levels one position too deep answer the same, with fewer drafts right.
        for plan in model_runner(llm).speculator.trees.plans.values():
            plan.growth.depths += 1
        with emitted(llm) as found:
            assert differing(answer_all(llm, GREEDY[:2]), alone[:2]) == []
        assert all(max(each) < 6 for each in found.values())


def _noted(calls: list[str], name: str, stock: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return stock(*args, **kwargs)

    return call


@pytest.mark.nightly
def test_hot_tokens_and_rows_in_fp8(
    perfect: Pair, alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root's children come from the FP8 head, levels from learned tokens once there are any."""
    passes = narrowed(monkeypatch)
    tree = {"hot_tokens": 256, "head_dtype": "fp8"}
    with perfect.engine(nodes=15, tree=tree, **MTP) as llm:
        assert differing(answer_all(llm, GREEDY), alone[: len(GREEDY)]) == []
        metrics = spec_metrics(llm)
        [info] = llm.collective_rpc("graft_info")
    assert {narrow for narrow, _ in passes} == {False, True}
    assert info["counters"]["tree"]["fp8_head_bytes"] > 0
    assert info["counters"]["tree"]["hot_tokens"]["active"] is True
    # The best token of a perfect module nearly always stays among the best four in FP8.
    assert metrics.accepted_per_position[0] > 0.9 * metrics.drafts


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target with experts, and a module with experts that predicts it without an error."""
    folder = str(write_glm4_moe(tmp_path_factory.mktemp("glm")))
    return Pair(folder, folder, TEXTS)


@pytest.fixture(scope="module")
def glm_alone(glm: Pair) -> list[Answer]:
    """What it answers to some greedy requests and a seeded one."""
    with glm.engine() as llm:
        return answer_all(llm, [*GREEDY[:3], *SEEDED[:1]])


def test_a_module_with_experts_gets_narrow_levels(
    device: str, glm: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ladder's shapes take turns, chains of several passes beside wider trees."""
    tokens = 40 if device == "cuda" else TOKENS
    requests = greedy(tokens, TEXTS[:3]) + seeded(tokens, TEXTS[:1])
    with glm.on(device).engine() as llm:
        expected = answer_all(llm, requests)
    turns = itertools.cycle([1, 2, 3, 6, 4, 14, 15])
    monkeypatch.setattr(NodeTuner, "begin_step", lambda tuner, batch: next(turns))
    drafted: set[TreeShape] = set()
    grow = LevelGrowth.grow

    def noted(levels: LevelGrowth, *args: Any, num_nodes: int, **kwargs: Any) -> int:
        drafted.add(replace(levels.shape, num_nodes=num_nodes))
        return grow(levels, *args, num_nodes=num_nodes, **kwargs)

    monkeypatch.setattr(LevelGrowth, "grow", noted)
    tree = {"shape": "auto", "graph_runner": "verify"}
    with glm.on(device).engine(nodes=15, tree=tree, **MTP) as llm:
        assert differing(answer_all(llm, requests), expected) == []
        metrics = spec_metrics(llm)
        [info] = llm.collective_rpc("graft_info")
        config = llm.llm_engine.vllm_config
        asked = TreeConfig.from_vllm(config)
        assert asked is not None
        assert "narrow shapes, as the draft has experts" in TREES.describe(asked, config)
        tuner = llm.llm_engine.engine_core.engine_core.scheduler.dynamic_sd_lookup.tuner
        measured = set(tuner.costs)
    sizes = [(1, 1, 1), (1, 2, 2), (1, 3, 3), (1, 4, 4), (2, 3, 6), (3, 4, 14), (3, 4, 15)]
    shapes = {TreeShape(*size) for size in sizes}
    counters = info["counters"]["tree"]
    assert {TreeShape(**each) for each in counters["shapes"]} == shapes
    if device == "cpu":
        assert shapes <= drafted
    else:
        # Replays draft, and each number of the ladder was measured before.
        assert measured == {0, *(shape.num_nodes for shape in shapes)}
        assert counters["draft_replays"] > 0
        assert not any(counters["draft_graphs_differing"].values())
        assert sum(map(bool, counters["draft_graphs_verified"].values())) > 4
    # Greedy drafts of a perfect module are right as deep as they go: 2.6 levels on average.
    assert metrics.accepted_tokens > 2 * metrics.drafts


@pytest.mark.nightly
def test_two_requests_choose_among_few_nodes_of_experts(glm: Pair, glm_alone: list[Answer]) -> None:
    """The number of nodes that is asked for is no choice there, and bounds the memory."""
    with glm.engine(nodes=15, tree={"shape": "auto"}, max_num_seqs=2, **MTP) as llm:
        assert differing(answer_all(llm, [*GREEDY[:3], *SEEDED[:1]]), glm_alone) == []
        [info] = llm.collective_rpc("graft_info")
        assert spec_metrics(llm).accepted_tokens > 0
    shapes = {TreeShape(**each) for each in info["counters"]["tree"]["shapes"]}
    assert shapes == {TreeShape(3, 4, 15), TreeShape(2, 3, 6), TreeShape(1, 1, 1)}


@pytest.mark.nightly
def test_glm_chooses_hot_tokens_behind_its_norm(
    glm: Pair, glm_alone: list[Answer], tmp_path: Path
) -> None:
    """Its module has experts, a head and a norm; the list has half of what is not emitted, too."""
    expected = glm_alone[:3]
    hot = {token for answer in expected for token in answer.tokens[0]} | set(range(0, 512, 2))
    (tmp_path / "hot.json").write_text(json.dumps(sorted(hot)))
    tree = {"hot_tokens": str(tmp_path / "hot.json")}
    with glm.engine(nodes=4, topk=1, steps=4, tree=tree, **MTP) as llm, emitted(llm) as found:
        assert differing(answer_all(llm, GREEDY[:3]), expected) == []
        head = model_runner(llm).speculator.head
        states = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)) * 7
        with torch.inference_mode():
            cut, whole = head.logits(states), head.draft.compute_logits(states)
        torch.testing.assert_close(cut, whole[:, sorted(hot)])
        del head
    assert set(map(tuple, found.values())) == {(1, 5, 5, 5, 5, 5)}


@pytest.mark.gpu
@pytest.mark.parametrize("write", [write_mimo, write_glm4_moe])
def test_a_perfect_module_in_full_graphs(write: Callable[[Path], Path], tmp_path: Path) -> None:
    """Hot tokens hold half of what is not emitted, too: the head is cut, behind its norm."""
    target = str(write(tmp_path / "target"))
    pair, requests = Pair(target, target, []).on("cuda"), greedy(40) + seeded(40)
    with pair.engine() as llm:
        expected = answer_all(llm, requests)
    emitted = {token for answer in expected for token in answer.tokens[0]}
    hot = tmp_path / "hot.json"
    hot.write_text(json.dumps(sorted(emitted | set(range(0, 512, 2)))))
    tree = {"graph_runner": "verify", "hot_tokens": str(hot)}
    with pair.engine(nodes=15, tree=tree, **MTP) as llm:
        assert differing(answer_all(llm, requests), expected) == []
        metrics = spec_metrics(llm)
        [info] = llm.collective_rpc("graft_info")
    # The first step of a short prompt is all that a perfect module may get wrong.
    assert metrics.accepted_per_position[0] > 0.9 * metrics.drafts
    assert metrics.accepted_per_position[2] > metrics.drafts / 2
    counters = info["counters"]["tree"]
    assert counters["draft_replays"] > 0
    assert counters["tree_replays"] > 0
    assert counters["draft_graphs_differing"] == {15: []}
    assert counters["draft_graphs_verified"][15]


@pytest.mark.gpu
def test_a_norm_and_a_head_in_fp8(glm: Pair) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs products of FP8 numbers")
    options: dict[str, Any] = {"nodes": 15, "tree": {"head_dtype": "fp8"}, "dtype": "bfloat16"}
    with glm.on("cuda").engine(**options, **MTP) as llm:
        answer_all(llm, GREEDY[:3] + SEEDED[:3])
        metrics = spec_metrics(llm)
        assert model_runner(llm).speculator.head.fp8.weight.dtype == torch.float8_e4m3fn
        [info] = llm.collective_rpc("graft_info")
    assert metrics.accepted_per_position[0] > 0.8 * metrics.drafts
    assert info["counters"]["tree"]["fp8_head_bytes"] > 0
    assert info["counters"]["tree"]["draft_replays"] > 0


@pytest.mark.nightly
def test_one_flag_turns_trees_on(perfect: Pair, alone: list[Answer]) -> None:
    """Its depth is the number of tokens that one would give to vLLM's chain."""
    with perfect.engine(method="mtp", chain=3, additional_config={"graft": "auto"}) as llm:
        assert differing(answer_all(llm, GREEDY), alone[: len(GREEDY)]) == []
        metrics = spec_metrics(llm)
        [told] = llm.collective_rpc("graft_info")
        assert model_runner(llm).speculator.num_speculative_steps == 63
    assert told["parts"] == ["tree"]
    assert "topk 8, steps 3" in told["preset"]["on"]["tree"]
    assert metrics.accepted_per_position[2] > 0
    assert not any(metrics.accepted_per_position[3:])
    assert metrics.draft_tokens > 3 * metrics.drafts


@pytest.mark.nightly
@pytest.mark.slow
def test_graphs_hold_the_module_s_passes(erring: Pair, alone: list[Answer]) -> None:
    """Recorded FULL graphs and interpreted kernels; each graph's first replay is compared."""
    short = [Request(each.prompt, {**each.params, "max_tokens": 8}) for each in GREEDY[:2]]
    tree = {"graph_runner": "verify", "hot_tokens": 64, "head_dtype": "fp8"}
    options: dict[str, Any] = {"attention": "triton", "graphs": [4, 8, 16], "max_num_seqs": 2}
    with erring.engine(nodes=7, steps=3, tree=tree, **MTP, **options) as llm:
        found = [answer.tokens[0] for answer in answer_all(llm, short)]
        assert found == [answer.tokens[0][:8] for answer in alone[:2]]
        graphs = model_runner(llm).speculator.draft_graphs()
        assert sum(graph.replays for graph in graphs) > 0
        [info] = llm.collective_rpc("graft_info")
        del graphs
    assert info["counters"]["tree"]["draft_graphs_differing"] == {7: []}
    assert info["counters"]["tree"]["draft_graphs_verified"][7]
