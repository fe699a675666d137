"""What a rehearsal foretells, against every launch of real engines, from their start on."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.answers.text_requests import TEXTS, greedy, seeded
from tests.support.checkpoints import write_likeness
from tests.support.engines.pairs import Pair, answer_all
from tests.support.models.block_drafts import (
    write_block_target,
    write_dflash,
    write_dspark,
    write_xpress,
)
from tests.support.models.mtp_targets import write_mimo
from tests.support.worlds.xpress_world import xpress_world
from vllm_graft.spec_decode.drafters.tree_drafting import TreeDrafting
from vllm_graft.spec_decode.kernels import topk
from vllm_graft.spec_decode.kernels.kernel_launch import Launch, listing
from vllm_graft.spec_decode.startup import rehearsal
from vllm_graft.spec_decode.startup.rehearsal import Rehearsed, rehearse
from vllm_graft.testing import TinyShape, model_runner, write_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

REQUESTS = greedy(9)[:2] + seeded(9)[:2]

GRAPHS: dict[str, Any] = {"attention": "triton", "graphs": [8, 16, 24], "max_num_seqs": 3}

BY_LENGTH = {"combine_kernel"}
"""Without a graph the splits of a request's keys depend on how many it has, and with them the
kernel that puts them together: as many powers of two as a context may have splits."""


class Watched:
    """What was foretold in an engine's start, and what it has launched."""

    def __init__(self) -> None:
        self.rehearsals: dict[str, Rehearsed] = {}
        self.launched: dict[Launch, None] = {}

    def unforetold(self, name: str = "right") -> Counter[str]:
        """Kernels that were launched in a way that a rehearsal has not foretold."""
        known = set(self.rehearsals[name].launches)
        return Counter(launch.name for launch in self.launched if launch not in known)

    def names(self, name: str = "right") -> Counter[str]:
        """Kernels that a rehearsal has foretold."""
        return Counter(launch.name for launch in self.rehearsals[name].launches)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """Rehearse where an engine with a GPU does, and list what it launches then."""
    seen = Watched()
    load = TreeDrafting.load_model

    def load_model(self: TreeDrafting, *args: Any, **kwargs: Any) -> None:
        before = dict(vars(self))
        seen.rehearsals["right"] = rehearse(self, flash=False)
        seen.rehearsals["flash"] = rehearse(self, flash=True)
        with monkeypatch.context() as patch:
            patch.setattr(topk, "topk_block", lambda vocab_size: (1024, 2))
            seen.rehearsals["wrong"] = rehearse(self, flash=False)
        # A rehearsal changes nothing.
        assert vars(self).keys() == before.keys()
        assert all(vars(self)[name] is value for name, value in before.items())
        load(self, *args, **kwargs)

    monkeypatch.setattr(TreeDrafting, "load_model", load_model)
    with listing(lambda launch: seen.launched.setdefault(launch), launch=True):
        yield seen


def check(watched: Watched, kernels: set[str]) -> None:
    """Every launch of an engine was foretold, but those that depend on lengths of texts."""
    assert watched.rehearsals["right"].problems == []
    assert kernels <= {launch.name for launch in watched.launched}
    assert set(watched.unforetold()) <= BY_LENGTH
    # Little is compiled in vain.
    foretold = set(watched.rehearsals["right"].launches)
    assert len(foretold - set(watched.launched)) <= len(foretold) // 2
    # A later start knows a launch by its words, and an address would be another one then.
    assert not any(" at 0x" in repr(launch) for launch in foretold)


DRAFTING = {"_seed_kernel", "_expand_kernel", "_rank_kernel", "_finish_kernel", "_block_kernel"}
VERIFYING = {"_rows_kernel", "_walk_kernel", "_compact_kernel", "split_kernel"}
ALL = {*DRAFTING, *VERIFYING, "_merge_kernel", "_follow_kernel", "_scratch_kernel"}


def test_all_launches_of_an_engine_are_foretold(pair: Pair, watched: Watched) -> None:
    """The engine has graphs per number of nodes, n-grams with a memory, steps without a graph."""
    tree = {"shape": "auto", "ngram": True, "memory": {"bytes": "1MiB"}}
    with pair.engine(nodes=7, topk=4, steps=4, tree=tree, **GRAPHS) as llm:
        answer_all(llm, REQUESTS)
        speculator = model_runner(llm).speculator
        assert speculator.report()["start"]["seconds"]["draft_graphs"] > 0
        assert speculator.numbers()["start_kernels"]["ahead"] == 0
        widths = {nodes + 1 for nodes in speculator.trees.plans}
        del speculator
    remembering = {"_write_kernel", "_search_kernel"}
    check(watched, {*ALL, *remembering, "_match_kernel", "_insert_kernel", "_learn_kernel"})
    # Control: had a launcher another block, its launches would not have been foretold.
    assert watched.unforetold("wrong")["_block_kernel"] > 0
    # Where FlashAttention reads the prefix, a kernel per width attends to the tree's own rows.
    assert "own_rows_kernel" not in watched.names()
    own = [each for each in watched.rehearsals["flash"].launches if each.name == "own_rows_kernel"]
    assert {dict(each.arguments)["MAX_ROWS"] for each in own} - {1} == widths
    assert watched.names("flash")["_walk_kernel"] == 1


def test_what_can_t_be_rehearsed_is_said(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, watched: Watched
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no table")

    monkeypatch.setattr(rehearsal, "KVCacheTable", broken)
    with pair.engine(nodes=3, topk=2, steps=2, max_num_seqs=2) as llm:
        answer_all(llm, REQUESTS[:1])
    [problem] = watched.rehearsals["right"].problems
    assert problem.startswith("verification: ")
    assert watched.unforetold()["_compact_kernel"] == 1


# --- other drafters -------------------------------------------------------------------------------


@contextlib.contextmanager
def small(folder: Path) -> Iterator[Pair]:
    target = str(write_llama(folder / "target", TinyShape(num_layers=2, hidden_size=32)))
    yield Pair(target, str(write_likeness(Path(target), folder / "draft", 0.2)), TEXTS)


def mimo(folder: Path) -> Pair:
    target = str(write_mimo(folder / "target"))
    return Pair(target, target, TEXTS)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "tree",
    [{}, {"hot_tokens": 64}, {"coupled": False}, {"draft_window": 40}],
    ids=["fixed", "learned", "uncoupled", "windowed"],
)
def test_other_trees(pair: Pair, watched: Watched, tree: dict[str, Any]) -> None:
    with pair.engine(nodes=7, topk=4, steps=4, tree=tree, **GRAPHS) as llm:
        answer_all(llm, REQUESTS)
    check(watched, ALL | ({"_window_kernel"} if "draft_window" in tree else set()))


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["mtp", "draft_model"])
def test_other_drafters(tmp_path: Path, watched: Watched, method: str) -> None:
    make: Callable[[Path], Any] = mimo if method == "mtp" else small
    made = make(tmp_path)
    with contextlib.ExitStack() as stack:
        pair = made if isinstance(made, Pair) else stack.enter_context(made)
        llm = stack.enter_context(pair.engine(nodes=7, topk=4, steps=3, method=method, **GRAPHS))
        answer_all(llm, REQUESTS)
    check(watched, ALL)


@pytest.mark.parametrize(
    "method",
    [
        "dspark",
        pytest.param("dflash", marks=pytest.mark.nightly),
        pytest.param("xpress", marks=pytest.mark.nightly),
    ],
)
def test_drafts_of_blocks(tmp_path: Path, watched: Watched, method: str) -> None:
    """Each number of nodes has a block of its own, and so kernels of its own."""
    write_block_target(tmp_path / "target", from_last=0.4)
    if method == "dspark":
        write_dspark(tmp_path / "draft", from_last=0.4, causal=True)
    elif method == "xpress":
        write_xpress(tmp_path / "draft", from_last=0.4, causal=True, topc=40)
    else:
        write_dflash(tmp_path / "draft", causal=True)
    pair = Pair(str(tmp_path / "target"), str(tmp_path / "draft"), TEXTS)
    tree = {"shape": "auto", "ngram": True}
    name = "dflash" if method == "xpress" else method
    with xpress_world(), pair.engine(method=name, nodes=3, steps=3, tree=tree, **GRAPHS) as llm:
        answer_all(llm, REQUESTS)
        assert len(model_runner(llm).speculator.trees.plans) > 1
    check(watched, {*DRAFTING, *VERIFYING, "_merge_kernel", "_follow_kernel", "_match_kernel"})
    assert watched.unforetold("wrong")["_block_kernel"] > 0


@pytest.mark.nightly
def test_n_grams_alone(pair: Pair, watched: Watched) -> None:
    """What drafts such trees is not rehearsed, what verifies them is."""
    with pair.engine(method="ngram", nodes=7, topk=2, **GRAPHS) as llm:
        answer_all(llm, REQUESTS)
    assert watched.rehearsals["right"].problems == []
    drafting = {"_paths_kernel", "_match_kernel", "_learn_kernel", "_rank_kernel", "_finish_kernel"}
    # It counts nodes of n-grams.
    drafting.add("_walk_kernel")
    unforetold = set(watched.unforetold())
    assert unforetold <= {*BY_LENGTH, *drafting}, unforetold
