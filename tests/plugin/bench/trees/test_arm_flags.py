"""Arms of a user's own model: engines and commands of the flags of `vllm serve`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.shipped_pair import SHIPPED
from vllm_graft.base.options import without
from vllm_graft.bench import BENCHMARKS, load
from vllm_graft.bench.common.arm import Arm
from vllm_graft.bench.common.report import BenchmarkError
from vllm_graft.bench.common.serve_flags import Serving, adding, groups
from vllm_graft.bench.common.told_lengths import SCHEDULER
from vllm_graft.bench.trees.arm_flags import LENGTHS, read_arms

TARGET, DRAFT = str(SHIPPED / "target"), str(SHIPPED / "eagle3")
SPECULATE = {"method": "eagle3", "model": DRAFT, "num_speculative_tokens": 15}
PLAIN = ("--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "6")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_GRAFT_INTERPRET", "1")


def given(*more: str, draft: bool = True) -> Serving:
    flags = ("--speculative-config", json.dumps(SPECULATE)) if draft else ()
    return Serving.read([TARGET, *PLAIN, *flags, *more], preset=True)


def speculative(arm: Arm) -> dict[str, Any]:
    return dict(arm.options["speculative_config"])


def test_stocks_best_arms_and_ours() -> None:
    none, chain, ngram, graft = read_arms(None, given(), sampled=False)
    assert [arm.name for arm in (none, ngram, graft)] == ["none", "ngram:5", "graft"]
    assert none.options == {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 6}
    assert none.commands == {"none": shlex.join(["vllm", "serve", TARGET, *PLAIN])}
    # One engine, which is told each length in turn; a command has one.
    assert list(chain.columns) == [f"chain:{count}" for count in LENGTHS]
    told = [[1, 1, 7], [2, 2, 5], [3, 3, 3], [4, 6, 2]]
    by_batch = {"num_speculative_tokens_per_batch_size": told, "num_speculative_tokens": 7}
    assert speculative(chain) == {**SPECULATE, **by_batch}
    command = shlex.split(chain.commands["chain:3"])
    assert json.loads(command[-1]) == {**SPECULATE, "num_speculative_tokens": 3}
    assert speculative(ngram)["method"] == "ngram_gpu"
    assert {**graft.options, "additional_config": {}, "speculative_config": {}} == {
        **none.options,
        "additional_config": {},
        "speculative_config": {},
    }
    assert speculative(graft) == SPECULATE
    assert graft.options["additional_config"] == {"graft": "auto"}
    assert graft.commands["graft"].endswith("--additional-config.graft auto")


def test_requests_with_a_temperature_get_the_chain_that_samples() -> None:
    [_, chain, *_] = read_arms(None, given(), sampled=True)
    assert list(chain.columns) == [f"block:{count}" for count in LENGTHS]
    assert speculative(chain)["rejection_sample_method"] == "block"


def test_without_a_draft_model_n_grams_are_compared() -> None:
    served = given(draft=False)
    names = [arm.name for arm in read_arms(None, served, sampled=False)]
    assert names == ["none", "ngram:5", "ngram:15", "graft"]
    with pytest.raises(BenchmarkError, match=r"chain:3.*: a chain needs a draft model"):
        read_arms(["chain:3"], served, sampled=False)


def test_parts_of_ours_are_left_out_of_stocks_arms() -> None:
    more = {"graft": {"tree": {"topk": 2}}, "other": 1}
    served = given("--additional-config", json.dumps(more))
    none, chain, graft = read_arms(["none", "chain:3", "graft"], served, sampled=False)
    for arm in (none, chain):
        assert arm.options["additional_config"] == {"other": 1}
        assert "topk" not in next(iter(arm.commands.values()))
    assert graft.options["additional_config"] == more


def test_more_flags_stand_behind_a_name() -> None:
    names = [
        "chain:2,3 --speculative-config.quantization fp8_per_channel",
        "graft --additional-config.graft.tree.topk 2",
    ]
    chain, graft = read_arms(names, given(draft=True), sampled=False)
    fp8 = " --speculative-config.quantization fp8_per_channel"
    assert chain.columns == {f"chain:2{fp8}": 2, f"chain:3{fp8}": 3}
    assert speculative(chain)["quantization"] == "fp8_per_channel"
    assert speculative(chain)["model"] == DRAFT
    read = Serving.read(shlex.split(chain.commands[f"chain:2{fp8}"])[2:])
    assert read.options()["speculative_config"]["num_speculative_tokens"] == 2
    assert graft.options["additional_config"] == {"graft": {"tree": {"topk": 2}}}


def test_several_lengths_need_our_scheduler() -> None:
    told, alone = read_arms(["chain:2,3", "chain:4"], given(), sampled=False)
    assert (told.drafts, told.options["scheduler_cls"]) == ((2, 3), SCHEDULER)
    assert "scheduler" not in "".join([*told.commands.values(), *alone.options])
    served = given()
    served.config.scheduler_config.scheduler_cls = "my.Scheduler"
    arms = read_arms(["chain:2,3"], served, sampled=False)
    assert [(arm.name, arm.drafts) for arm in arms] == [("chain:2", ()), ("chain:3", ())]
    assert [speculative(arm)["num_speculative_tokens"] for arm in arms] == [2, 3]


@pytest.mark.parametrize(
    "name", ["", "tree:31", "chain", "chain:", "chain:0", "chain:3,3", "ngram:5,6"]
)
def test_names_that_say_nothing(name: str) -> None:
    with pytest.raises(BenchmarkError, match=f"--arms '{name}': say none, graft"):
        read_arms([name], given(draft=True), sampled=False)


@pytest.mark.parametrize(
    ("flags", "arm", "words"),
    [
        (["--additional-config.graft.tre.topk", "2"], "none", "Did you mean 'tree'"),
        ([], "graft --additional-config.graft.tree.topkk 2", "Did you mean 'topk'"),
        ([], "chain:2 --speculative-config.model no/such", "no/such is not there"),
        (["--additional-config.graft.draft", "{}"], "graft", "graft.draft"),
    ],
)
def test_what_is_refused_starts_no_engine(
    flags: list[str], arm: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(BenchmarkError, match=words):
        read_arms([arm], given(*flags), sampled=False)


def test_trees_that_would_not_grow_are_no_arm_of_ours() -> None:
    served = given("--additional-config", '{"graft": {}}')
    with pytest.raises(BenchmarkError, match=r"'graft': no tree would grow: It was not asked for"):
        read_arms(["graft"], served, sampled=False)


def test_flags_in_all_forms_are_left_out() -> None:
    flags = ["m", "--a-b", "1", "--a_b=2", "--a-b.c", "3", "--a-bc", "4", "-x", "5", "--last"]
    assert without(flags, "--a-b", "-x") == ["m", "--a-bc", "4", "--last"]


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["m"], ["m", "--a-b", '{"k": 1}']),
        (["m", "--a_b", '{"j": 0}', "-x"], ["m", "-x", "--a-b", '{"j": 0, "k": 1}']),
        (["m", '--a-b={"k": 0}', "-x"], ["m", "-x", "--a-b", '{"k": 1}']),
        (["m", "--a-b.j", "0"], ["m", "--a-b.j", "0", "--a-b.k", "1"]),
        (["m", "--a-b.k", "0"], ["m", "--a-b.k", "0"]),
    ],
)
def test_keys_are_added_to_a_flag_in_any_form(flags: list[str], found: list[str]) -> None:
    assert adding(flags, "--a-b", {"k": 1}) == found


def test_engines_are_up_together_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    one = Arm("none", per_gpu=(10 << 30, 1 << 17))
    other = Arm("graft", per_gpu=(12 << 30, 1 << 17))
    assert groups([one, other], 1 << 30) == [[one, other]], "there is no GPU"
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(
        type(current_platform), "get_device_total_memory", classmethod(lambda *_: 80 << 30)
    )
    # Each has 36 GiB: 12 of weights, 5 of allowance, 19 for K/V.
    assert groups([one, other], 19 << 13) == [[one, other]]
    assert groups([one, other], (19 << 13) + 1) == [[one], [other]]
    told = Arm("told", {"kv_cache_memory_bytes": 20 << 30}, per_gpu=one.per_gpu)
    assert groups([one, told], 1) == [[one, told]]
    told.options["kv_cache_memory_bytes"] <<= 1
    assert groups([one, told], 1) == [[one], [told]]
    unknown = Arm("unknown")
    assert groups([one, unknown], 1) == [[one], [unknown]]


def test_no_flag_is_vllms_as_well() -> None:
    import argparse

    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve = ServeSubcommand().subparser_init(parser.add_subparsers())
    theirs = {flag for action in serve._actions for flag in action.option_strings}
    assert "--max-model-len" in theirs
    for name in BENCHMARKS:
        ours = argparse.ArgumentParser(add_help=False)
        load(name).add_arguments(ours)
        flags = {flag for action in ours._actions for flag in action.option_strings}
        assert flags & theirs == set(), name


def test_a_pair_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"the flags: .*model is not there"):
        Serving.read([str(tmp_path / "model")])
