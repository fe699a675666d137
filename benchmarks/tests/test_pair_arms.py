"""Arms of a pair in one word: which engines they stand for."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pair_arms as arms
from vllm_graft.bench.common.arm import Arm as NamedArm
from vllm_graft.bench.common.report import BenchmarkError
from vllm_graft.bench.common.told_lengths import SCHEDULER


def read(name: str) -> NamedArm:
    return arms.read_arm(name, Path("pair"), topk=8, steps=6, max_num_seqs=4)


def tree(name: str) -> dict[str, Any]:
    """Return the section of an arm's trees."""
    section: dict[str, Any] = read(name).options["additional_config"]["graft"]["tree"]
    return section


def speculative(name: str) -> dict[str, Any]:
    return dict(read(name).options["speculative_config"])


PLAIN = {"topk": 8, "steps": 6, "recurrent": True}


def test_arms() -> None:
    ours = speculative("tree:31@[[1,2,31],[3,9,7]]")
    assert ours["num_speculative_tokens"] == 31
    assert ours["num_speculative_tokens_per_batch_size"] == [[1, 2, 31], [3, 9, 7]]
    graft = read("tree:31@[[1,2,31],[3,9,7]]").options["additional_config"]
    assert graft == {"graft": {"tree": PLAIN}}
    assert tree("auto:63")["shape"] == "auto"
    chain = read("chain:5").options
    assert "additional_config" not in chain
    assert read("graft-chain:5").options == {**chain, "additional_config": {"graft": {"draft": {}}}}
    assert read("none").options == {}
    assert read("none").columns == {"none": None}
    assert read("graft").options == {"additional_config": {"graft": "auto"}}
    several = read("sampled:3,7,5")
    assert several.columns == {"sampled:3": 3, "sampled:7": 7, "sampled:5": 5}
    chains = speculative("sampled:3,7,5")
    assert chains["draft_sample_method"] == "probabilistic"
    assert chains["num_speculative_tokens"] == 7
    assert chains["num_speculative_tokens_per_batch_size"] == [[1, 1, 7], [2, 2, 5], [3, 4, 3]]


@pytest.mark.parametrize(
    ("name", "columns", "key", "value", "plain"),
    [
        ("block:3,5", ["block:3", "block:5"], "rejection_sample_method", "block", "sampled:3,5"),
        ("adaptive:3,5+fp8", ["adaptive:3+fp8", "adaptive:5+fp8"], "enable_adaptive_verification",
         True, "block:3,5+fp8"),
        # vLLM's key leaves the output head as it is, so our engine alone gets our key.
        ("sampled:3,5+fp8", ["sampled:3+fp8", "sampled:5+fp8"], "quantization", "fp8_per_channel",
         "sampled:3,5"),
        ("auto:63+fp8", ["auto:63+fp8"], "quantization", "fp8_per_channel", "auto:63"),
    ],
)  # fmt: skip
def test_arms_that_differ_by_one_key(
    name: str, columns: list[str], key: str, value: Any, plain: str
) -> None:
    """Chains verified as a block, or adaptively; drafts in FP8."""
    several = "," in name
    assert read(name).columns == dict(zip(columns, (3, 5) if several else (None,)))
    ours = speculative(name)
    assert ours.pop(key) == value
    assert ours == speculative(plain)
    assert ("additional_config" in read(name).options) is not several


def test_stock_n_grams_need_no_draft() -> None:
    arm = read("ngram:10")
    assert arm.columns == {"ngram:10": None}
    told = arm.options["speculative_config"]
    assert (told["method"], told["num_speculative_tokens"]) == ("ngram_gpu", 10)
    assert "model" not in told
    for wrong in ("ngram:5,10", "ngram:10+fp8", "ngram:10+hot64", "ngram"):
        with pytest.raises(BenchmarkError, match=r"--arms .ngram"):
            read(wrong)


def test_arms_whose_compiled_kernels_begin_early() -> None:
    early = {"inductor_compile_config": {"triton.enable_pdl": True}}
    for name in ("none", "block:3,5", "auto:63+fp8", "auto:63+fp8head+ngram"):
        options = dict(read(f"{name}+pdl").options)
        assert options.pop("compilation_config") == early
        assert options == read(name).options
    assert read("block:3,5+fp8+pdl").columns == {"block:3+fp8+pdl": 3, "block:5+fp8+pdl": 5}
    with pytest.raises(BenchmarkError, match="say none"):
        read("none+fp8")
    # Sizes of graphs, which all arms have, don't replace an arm's own settings.
    found = arms.with_options(
        read("none+pdl").options, {"compilation_config": {"cudagraph_capture_sizes": [1]}}
    )
    assert found["compilation_config"] == early | {"cudagraph_capture_sizes": [1]}


def test_a_tree_that_can_t_hold_its_nodes_starts_no_engine() -> None:
    def read(name: str, method: str = "eagle3") -> NamedArm:
        return arms.read_arm(name, Path("pair"), 2, 4, 4, method)

    assert read("auto:14").options
    for name in ("auto:15", "tree:15@[[1,4,15]]"):
        with pytest.raises(BenchmarkError, match=r"a tree of topk 2 and 4 steps holds 14 nodes"):
            read(name)
    # The depth of these is not the steps that are given here.
    assert read("auto:15", "dspark").options


@pytest.mark.parametrize(
    ("name", "plain", "more"),
    [
        ("auto:63+fp8", "tree:31", {"shape": "auto", "head_dtype": "fp8"}),
        ("tree:31+window2048", "tree:31", {"draft_window": 2048}),
        ("auto:63+fp8head+hot49152", "auto:63+fp8head", {"hot_tokens": 49152}),
        ("tree:31+states", "tree:31", {"recurrent_form": "states"}),
        ("tree:31+ngram", "tree:31", {"ngram": True}),
        ("auto:63+fp8+ngram", "tree:31", {"ngram": True, "shape": "auto", "head_dtype": "fp8"}),
        ("auto:63+fp8head+whole", "auto:63+fp8head", {"policy": "whole"}),
        ("auto:63+fp8head", "auto:63+fp8", {}),
    ],
)
def test_arms_whose_trees_have_more_keys(name: str, plain: str, more: dict[str, Any]) -> None:
    assert tree("tree:31") == PLAIN
    assert tree(name) == {**tree(plain), **more}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("auto:63+window64+fp8head", "auto:63+fp8head+window64"),
        ("auto:63+fp8head+hot49152", "auto:63+hot49152+fp8head"),
        ("auto:63+fp8+ngram", "auto:63+ngram+fp8"),
    ],
)
def test_the_order_of_options_does_not_count(one: str, other: str) -> None:
    assert read(one).options == read(other).options
    assert read(one).columns == {one: None}


def test_a_head_alone_in_fp8_leaves_the_draft_as_it_is() -> None:
    assert "quantization" not in speculative("auto:63+fp8head")


@pytest.mark.parametrize(
    "name",
    [
        *("tree:31+window", "tree:31+window0", "block:3+window64", "none+window64"),
        *("auto:63+hot", "auto:63+hot0", "block:3+hot8192", "none+hot8192"),
        *("chain:3+states", "graft-chain:3+ngram", "graft-chain:3,5", "block:3+fp8head"),
        *("forest:3", "chain", "chain:", "chain:x", "tree:3,5", "chain:3,3", "chain:1,2,3,4,5"),
    ],
)
def test_names_that_say_nothing(name: str) -> None:
    with pytest.raises(BenchmarkError, match=f"--arms '{re.escape(name)}'"):
        read(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tree:31+window64+window2048", "a draft has one +window"),
        ("tree:31+window64+pdl+window64", "a draft has one +window"),
        ("tree:31+hot64+hot8192", "a draft has one +hot"),
        ("tree:31+window1048577", "graft.tree.draft_window: 1048577 is refused"),
        (f"tree:31+window{'9' * 5000}", "--arms"),
        ("tree:31+window1\u0663", "--arms"),
        ("tree:31@x", "behind @ is no JSON"),
        ("tree:31@[[1,4,3]", "behind @ is no JSON"),
    ],
)
def test_arms_that_contradict_themselves_start_no_engine(name: str, words: str) -> None:
    with pytest.raises(BenchmarkError, match="--arms") as caught:
        read(name)
    assert words in str(caught.value)


def arms_of(*names: str, **options: Any) -> list[NamedArm]:
    parser = argparse.ArgumentParser()
    arms.add_pair_arguments(parser)
    given = parser.parse_args(["pair"])
    given.arms, given.steps, given.requests_in_flight = names, 6, [1, 4, 16]
    given.options = options
    return arms.read_arms(given)


def test_several_lengths_need_our_scheduler() -> None:
    several, one = arms_of("block:3,5", "block:3", tensor_parallel_size=2)
    assert (several.drafts, several.options["scheduler_cls"]) == ((3, 5), SCHEDULER)
    assert "scheduler_cls" not in one.options


def test_arms_of_other_drafts() -> None:
    pair = Path("pair")
    assert arms.draft_folder(pair, "mtp") == pair / "target"
    assert arms.draft_folder(pair, "dspark") == pair / "dspark"
    for name in ("block:1,2", "auto:15"):
        arm = arms.read_arm(name, pair / "target", 8, 4, 4, "mtp")
        ours, theirs = dict(arm.options["speculative_config"]), speculative(name)
        assert (ours.pop("method"), ours.pop("model")) == ("mtp", "pair/target")
        assert (theirs.pop("method"), theirs.pop("model")) == ("eagle3", "pair")
        assert ours == theirs


def test_options_of_all_arms_leave_an_arms_own_alone() -> None:
    more = {"seed": 3, "additional_config": {"gdn_prefill_backend": "triton"}}
    found = arms.with_options(read("tree:7").options, more)
    assert found["seed"] == 3
    assert found["additional_config"].keys() == {"gdn_prefill_backend", "graft"}
    assert found["speculative_config"]["num_speculative_tokens"] == 7
    assert arms.with_options({}, more) == more
    assert arms.with_options({}, {}) == {}
