"""Draft models, and assistants of Gemma 4, on real engines."""

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.answers.text_requests import TEXTS, both_kinds, greedy, in_pairs, seeded
from tests.support.checkpoints import write_likeness
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
from tests.support.models.window_models import BLOCK, write_gemma4, write_gemma4_assistant
from tests.support.references.tree_reference import finish_and_compare
from tests.support.watches import emitted, proposed
from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.drafters import tree_drafting
from vllm_graft.spec_decode.drafters.gemma4 import Gemma4Trees
from vllm_graft.spec_decode.drafters.standalone.first_pass import ExtendInputs
from vllm_graft.spec_decode.targets.dense import layer as dense_layer
from vllm_graft.testing import TinyShape, model_runner, spec_metrics, write_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

TOKENS = 13
GREEDY = greedy(TOKENS)
SEEDED = seeded(TOKENS)
OWN: dict[str, Any] = {"method": "draft_model"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "target"
    return write_llama(folder, TinyShape(num_layers=2, hidden_size=32))


@pytest.fixture(scope="module")
def perfect(target: Path) -> Pair:
    """A target that is its own draft model."""
    return Pair(str(target), str(target), TEXTS)


@pytest.fixture(scope="module")
def erring(target: Path) -> Pair:
    """A draft that is often right."""
    return Pair(str(target), str(write_likeness(target, target.parent / "draft", 0.2)), TEXTS)


@pytest.fixture(scope="module")
def alone(perfect: Pair) -> list[Answer]:
    """What the target answers without drafts, to greedy and to seeded requests."""
    with perfect.engine() as llm:
        return answer_all(llm, GREEDY + SEEDED)


class Watch:
    """Compares each tree with the one that a plain reference makes of the same candidates."""

    def __init__(self, finish: Any) -> None:
        self.finish, self.branching = finish, 0

    def __call__(self, table: Any, num_reqs: int, *args: Any, **extra: Any) -> None:
        *_, slots, tree, _ = args
        finish_and_compare(self.finish, table, num_reqs, *args, **extra)
        used = tree.parents[slots[slots >= 0]]
        self.branching += int((used == 0).sum(1).gt(1).sum())


def test_answers_are_the_target_s(
    erring: Pair, alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunked prompts beside trees, prefix caching and steps without drafts, all at once."""
    watch = Watch(tree_drafting.finish_tree)
    monkeypatch.setattr(tree_drafting, "finish_tree", watch)
    # Four requests at once get no drafts.
    ranges = [(1, 3, 15), (4, 4, 0)]
    with erring.engine(nodes=15, topk=4, steps=4, ranges=ranges, **OWN, **crowded()) as llm:
        assert type(model_runner(llm).speculator).__name__ == "DraftModelTrees"
        with scheduling(llm) as seen:
            assert differing(answer_all(llm, GREEDY + SEEDED), alone) == []
            assert differing(answer_all(llm, GREEDY[1:3]), alone[1:3]) == []
        assert seen.chunks_beside_drafts > 0
        assert counter(llm, "vllm:prefix_cache_hits") > 0
        metrics = spec_metrics(llm)
        [info] = llm.collective_rpc("graft_info")
        # Negative control: the accepted path's K/V stays where the tree left it.
        monkeypatch.setattr(dense_layer, "compact_kv", lambda *args, **kwargs: None)
        assert llm.reset_prefix_cache()
        assert differing(answer_all(llm, GREEDY[:2]), alone[:2]) != []
    assert watch.branching > 10
    # Some drafts at the third depth are right, and fewer than at the first.
    assert metrics.accepted_per_position[0] > metrics.accepted_per_position[2] > 0
    counted = info["counters"]["tree"]
    assert counted["nodes_verified"] > 0
    assert counted["level_bytes"] > 0


@pytest.mark.nightly
def test_a_preset_chooses_the_nodes_of_its_trees(erring: Pair, alone: list[Answer]) -> None:
    preset = {"graft": "auto"}
    with erring.engine(chain=4, max_num_seqs=4, additional_config=preset, **OWN) as llm:
        assert type(model_runner(llm).speculator).__name__ == "DraftModelTrees"
        assert differing(answer_all(llm, GREEDY + SEEDED), alone) == []
        [info] = llm.collective_rpc("graft_info")
        metrics = spec_metrics(llm)
    assert info["preset"]["on"]["tree"].startswith("trees of up to 15 nodes: topk 4, steps 4")
    assert metrics.accepted_tokens > metrics.drafts / 2


SIZES = [2, 6, 8, 12, 24, 30]
"""Rows: a level has two per request, the target six, the draft's first pass seven."""


def draft_graphs(pair: Pair, **tree: Any) -> Any:
    return pair.engine(
        nodes=5, topk=2, steps=3, graphs=SIZES, max_num_seqs=4, tree=tree,
        enable_prefix_caching=False, **OWN,
    )  # fmt: skip


def drafted_in(llm: Any) -> tuple[list[Answer], list[int], dict[str, Any]]:
    """Answers of batches of one, of three, and of two, which are padded to three."""
    found = [answer_all(llm, part) for part in (GREEDY[:1], GREEDY[:3], SEEDED[:2])]
    [info] = llm.collective_rpc("graft_info")
    answers = [answer for part in found for answer in part]
    return answers, list(spec_metrics(llm).accepted_per_position), info["counters"]["tree"]


def test_the_first_pass_runs_as_a_graph(
    erring: Pair, alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drafts what launches draft; negative control: a graph that never sees a step's batch."""
    expected = alone[:1] + alone[:3] + alone[len(GREEDY) :][:2]
    with draft_graphs(erring, graph_runner="verify") as llm:
        answers, accepted, info = drafted_in(llm)
        assert differing(answers, expected) == []
        assert 0 < accepted[1] < accepted[0]
        assert info["first_pass_graphs"] == {6: [1, 3, 4]}
        assert info["first_pass_replays"] > info["first_pass_launches"] > 0
        assert info["first_pass_graphs_verified"] == {6: [1, 3]}
        assert info["first_pass_graphs_differing"] == {6: []}
        good = accepted_of(llm, GREEDY[:3], alone[:3])
        monkeypatch.setattr(ExtendInputs, "load", lambda *args: None)
        assert accepted_of(llm, GREEDY[:3], alone[:3]) < good


def accepted_of(llm: Any, requests: list[Request], expected: list[Answer]) -> int:
    """How many drafts are accepted for requests, whose answers are the target's."""
    before = spec_metrics(llm).accepted_tokens
    assert differing(answer_all(llm, requests), expected) == []
    return spec_metrics(llm).accepted_tokens - before


def test_a_chain_is_accepted_as_stock_vllm_s(erring: Pair, alone: list[Answer]) -> None:
    """Step by step: a wrong row or position of the draft would change what it drafts."""
    steps = []
    for options in ({"chain": 4}, {"nodes": 4, "topk": 1, "steps": 4}):
        with erring.engine(**OWN, **options) as llm, emitted(llm) as found:
            assert differing(answer_all(llm, GREEDY), alone[: len(GREEDY)]) == []
            steps.append(dict(found))
    assert steps[0] == steps[1]
    lengths = {length for each in steps[0].values() for length in each[1:]}
    assert len(lengths) > 2


def test_a_perfect_draft_is_accepted_to_its_end(
    perfect: Pair, alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeded requests, too, as drafts see the noise; negative control: that of other positions."""
    # Sharpened logits with the target's noise may have another largest one.
    monkeypatch.setattr("vllm_graft.spec_decode.heads.head.SHARPNESS", 1.0)
    requests, answers = GREEDY[:1] + SEEDED[1:3], alone[:1] + alone[len(GREEDY) + 1 :][:2]
    with perfect.engine(nodes=5, topk=1, steps=5, **OWN) as llm:
        with emitted(llm) as found:
            assert differing(answer_all(llm, requests), answers) == []
        # One token of the prompt's step, then five drafts and the bonus token.
        assert {tuple(each) for each in found.values()} == {(1, 6, 6)}
        drafter = type(model_runner(llm).speculator)
        monkeypatch.delattr(drafter, "noise")
        with emitted(llm) as found:
            assert differing(answer_all(llm, requests[1:]), answers[1:]) == []
        assert all(max(each) < 6 for each in found.values())


@pytest.mark.gpu
def test_full_graphs_of_a_perfect_draft(pair: Pair) -> None:
    """The target is its own draft, so that nearly all drafts are right, seeded ones as well."""
    texts = ("def main(argv):\n", "import os, sys\nimport", "class Tree:\n    def")
    requests = in_pairs(48, texts, temperature=0.6)
    own = Pair(pair.target, pair.target, []).on("cuda")
    with own.engine() as llm:
        expected = answer_all(llm, requests)
    with own.engine(nodes=15, topk=4, steps=5, **OWN) as llm:
        # Graphs of the first pass have 17 rows per request, and here 128 rows at most.
        found = answer_all(llm, requests[:4]) + answer_all(llm, requests[4:])
        assert differing(found, expected) == []
        (info,) = llm.collective_rpc("graft_info")
        assert spec_metrics(llm).acceptance_length > 4.5
    counted = info["counters"]["tree"]
    assert counted["draft_replays"] > 0
    assert counted["first_pass_replays"] > counted["first_pass_launches"] > 0
    assert counted["tree_replays"] > 0


# --- assistants of Gemma 4 ----------------------------------------------------------------------

PROMPTS = [[7, 3, 9, 30, 2], [5] * 40, list(range(1, 90))]
"""The last one is longer than a window, and comes in two chunks."""

GEMMA4_TOKENS, STEPS = 14, 4
CHAIN: dict[str, Any] = {"nodes": STEPS, "topk": 1, "steps": STEPS, "method": "mtp"}
TREE: dict[str, Any] = {"nodes": 9, "topk": 3, "steps": STEPS, "method": "mtp"}
OPTIONS = {"block_size": BLOCK, "skip_tokenizer_init": True, "max_num_batched_tokens": 96}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma4")
    write_gemma4(folder / "target")
    write_gemma4_assistant(folder / "assistant")
    write_gemma4_assistant(folder / "ordered", ordered=True)
    return folder


def gemma4(folder: Path, draft: str = "assistant", device: str = "cpu") -> Pair:
    return Pair(str(folder / "target"), str(folder / draft), []).on(device)


@pytest.fixture(scope="module")
def gemma4_alone(folder: Path, device: str) -> list[list[int]]:
    with gemma4(folder, device=device).engine(**OPTIONS) as llm:
        return both_kinds(llm, PROMPTS, GEMMA4_TOKENS)


def test_a_chain_drafts_what_stock_vllm_drafts(
    folder: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy drafts of stock's chain are the best path of ours, token by token."""
    # The interpreted back end takes seconds for the longest, which the tests below send.
    cpu: dict[str, Any] = {"attention": "triton"}
    tokens, count, more = (24, 3, {}) if device == "cuda" else (8, 2, cpu)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = [{"prompt_token_ids": each} for each in PROMPTS[:count]]

    def served(**drafts: Any) -> list[list[list[int]]]:
        with (
            gemma4(folder, device=device).engine(**drafts, **more, **OPTIONS) as llm,
            proposed(llm) as found,
        ):
            llm.generate(prompts, params, use_tqdm=False)
            assert isinstance(model_runner(llm).speculator, Gemma4Trees) is ("nodes" in drafts)
        return found

    stock = served(chain=STEPS, method="mtp")
    assert len(stock) > tokens / 2
    assert served(**CHAIN) == stock
    if device == "cpu":
        # Control: levels at positions of their own, as drafts with K/V have them.
        monkeypatch.setattr(Gemma4Trees, "advance_draft_positions", True)
        assert served(**CHAIN) != stock


def test_a_chain_on_the_cpu_s_own_attention_is_refused(folder: Path) -> None:
    """Its target keeps K/V in a layout that the assistant's layers would read wrongly."""
    with (
        pytest.raises(ConfigError, match="topk is 1, but the attention backend CPU_ATTN keeps"),
        gemma4(folder).engine(**CHAIN, **OPTIONS),
    ):
        pass


def test_trees_answer_as_the_target_alone(
    folder: Path, device: str, gemma4_alone: list[list[int]]
) -> None:
    """An assistant of a small Gemma computes logits of the tokens near a state alone."""
    for draft in ("assistant", "ordered") if device == "cuda" else ("assistant",):
        with gemma4(folder, draft, device).engine(**TREE, **OPTIONS) as llm:
            assert both_kinds(llm, PROMPTS, GEMMA4_TOKENS) == gemma4_alone
            speculator = model_runner(llm).speculator
            assert isinstance(speculator, Gemma4Trees)
            # Its layers keep nothing of a tree.
            assert speculator.growth_bytes == 0
            counters = speculator.context.counters
            [info] = llm.collective_rpc("graft_info")
            del speculator
        replayed = device == "cuda"
        assert (counters.tree_replays if replayed else counters.tree_launches) > 0
        assert (info["counters"]["tree"]["draft_replays"] > 0) is replayed


@pytest.mark.nightly
@pytest.mark.parametrize("draft", ["assistant", "ordered"])
@pytest.mark.parametrize("device", ["cpu"], scope="module")
def test_graphs_draft_what_launches_draft(
    folder: Path, gemma4_alone: list[list[int]], draft: str
) -> None:
    steps = []
    for graphs in ([1, 2, 4, 8, 10, 20, 40], None):
        more: dict[str, Any] = {"attention": "triton"} | ({"graphs": graphs} if graphs else {})
        with gemma4(folder, draft).engine(max_num_seqs=4, **TREE, **OPTIONS, **more) as llm:
            with proposed(llm) as found:
                assert both_kinds(llm, PROMPTS, GEMMA4_TOKENS) == gemma4_alone
            [info] = llm.collective_rpc("graft_info")
        assert (info["counters"]["tree"]["draft_replays"] > 0) is bool(graphs)
        steps.append(found)
    assert steps[0] == steps[1]
    assert len(steps[0]) > GEMMA4_TOKENS / 2
