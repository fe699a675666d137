"""The judge of a proof, and the command around it, without engines."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.plugin.plan.stranger_models import LLAMA, write_models
from vllm_graft.base.errors import GraftError
from vllm_graft.plan.request import Request, inspecting
from vllm_graft.proof import arms, command, engine_process, questions
from vllm_graft.proof.engine_process import Outcome
from vllm_graft.proof.questions import Answer, Question, Round, rounds
from vllm_graft.proof.verdict import TOLERANCES, broken, differences, undone
from vllm_graft.seams import permission, proofs

GREEDY = Round("greedy", (Question((2, 3)), Question((4,))))
SEEDED = Round("seeds", tuple(Question((2,), seed=seed) for seed in range(5)))


def answer(*tokens: int, gap: float = 2.0, shift: float = 0.0) -> Answer:
    """Tokens of 0 and 1, of which 0 is `gap` nats more likely everywhere."""
    places = [{0: -0.1 + shift, 1: -0.1 - gap + shift} for _ in tokens]
    return Answer([*tokens], places)


def judged(
    asked: Round, found: list[Answer], dtype: str = "float32", gap: float = 2.0
) -> list[str]:
    expected = [answer(0, 0, 0, 0, gap=gap) for _ in asked.questions]
    return list(differences([asked], [found], [expected], dtype))


def test_equal_answers_pass() -> None:
    assert judged(GREEDY, [answer(0, 0, 0, 0), answer(0, 0, 0, 0)]) == []
    # Nobody asked for logprobs.
    assert judged(GREEDY, [Answer([0] * 4), Answer([0] * 4)]) == []


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_what_is_no_rounding_fails(dtype: str) -> None:
    near, same = TOLERANCES[dtype], answer(0, 0, 0, 0)
    [line] = judged(GREEDY, [Answer([0, 0, 1, 0]), same], dtype)
    assert line == "greedy, request 0: token 2 is 1, which is 2 nats behind 0"
    assert (
        "log-probabilities of token 0 differ"
        in judged(GREEDY, [same, answer(0, 0, 0, 0, shift=1.1 * near)], dtype)[0]
    )
    assert "it ends after 3 tokens" in judged(GREEDY, [Answer([0, 0, 0]), same], dtype)[0]
    # Rounding, and a near tie that falls otherwise, after which the contexts are others.
    tied = Answer([0, 1, 1, 1], answer(0, 0, gap=0.9 * near, shift=0.09 * near).logprobs)
    alike = answer(0, 0, 0, 0, gap=0.9 * near)
    assert judged(GREEDY, [tied, alike], dtype, gap=0.9 * near) == []


def test_seeds_have_to_be_equal_but_for_ties_with_noise() -> None:
    same, other = answer(0, 0, 0, 0), Answer([1, 1, 1, 1])
    found = [same, same, same, same, other]
    assert judged(SEEDED, found, "bfloat16") == []
    assert judged(SEEDED, found, "float32") != []
    assert judged(SEEDED, [other] * 5, "bfloat16") == [
        "seeds: only 0 of 20 tokens are those without our parts"
    ]


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_what_is_no_number_fails(dtype: str) -> None:
    same, none = answer(0, 0, 0, 0), answer(0, 0, 0, 0, shift=math.nan)
    assert "token 0 differ by nan" in judged(GREEDY, [same, none], dtype)[0]
    # Nor is an engine that gives none a judge.
    asked, found = [Round("greedy", (Question((2,)),))], Answer([1, 1, 1, 1])
    assert len(list(differences(asked, [[found]], [[none]], dtype))) == 1
    partly = answer(0, 0, 0, 0)
    partly.logprobs[1] = {0: -0.1}
    assert "token 1 differ by nan" in judged(GREEDY, [same, partly], dtype)[0]


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_more_tokens_and_fewer_log_probabilities_fail(dtype: str) -> None:
    asked = Round("told", (Question((2,), told=True), Question((2,), seed=1, told=True)))
    same = answer(0, 0, 0, 0)
    assert judged(asked, [same, same], dtype) == []
    longer = answer(0, 0, 0, 0, 0)
    for found in ([longer, same], [same, longer]):
        [line] = judged(asked, found, dtype)
        assert "it ends after 5 tokens, not after 4" in line
    [line] = judged(asked, [same, answer(0, 0, 0)], dtype)[:1]
    assert "it ends after 3 tokens, not after 4" in line
    [line] = judged(asked, [Answer([0] * 4), same], dtype)
    assert line == "told, request 0: 0 of 4 tokens have log-probabilities"


def test_what_was_not_shown_is_told() -> None:
    wanted = {"evictions": "evictions", "hits": "hits"}
    assert list(undone({"evictions": 3.0, "hits": 0.0}, wanted)) == [
        "nothing was shown of hits (hits is 0)"
    ]
    assert len(list(undone({}, wanted))) == 2


def test_what_a_server_would_survive_is_told() -> None:
    counts = {"vllm:graft_vit_dropped_graphs/mismatch": 2.0, "vllm:graft_vit_declines/error": 0.0}
    [line] = broken({**counts, "vllm:graft_vit_dropped_graphs/evicted": 3.0})
    assert line.startswith("2 vision graphs gave other embeddings")


def test_questions_are_the_same_in_each_process() -> None:
    assert list(rounds(cache=True)) == list(rounds(cache=True))
    assert [each.name for each in rounds(cache=False)] == [
        "prompts", "prefixes", "seeds", "preemption",
    ]  # fmt: skip


class Process:
    """Stands in for a process: its engine answers as all do, but for what is changed."""

    def __init__(self) -> None:
        self.outcome = Outcome()
        self.options: dict[str, Any] = {}

    def ask(self, target: Path, options: dict[str, Any], asked: list[Round]) -> None:
        self.options = options
        answers = [[answer(0, 0, 0, 0) for _ in each.questions] for each in asked]
        counts = {"vllm:num_preemptions": 1.0, "vllm:spec_decode_num_accepted_tokens": 2.0}
        self.outcome = Outcome(answers, counts, {"a.b": "0123"})

    def finish(self) -> Outcome:
        return self.outcome


class Engines:
    """Both processes of the last proof."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pair: list[Process] = []
        monkeypatch.setattr(engine_process, "both", self.both)

    @contextlib.contextmanager
    def both(self) -> Iterator[list[Process]]:
        self.pair = [Process(), Process()]
        yield self.pair

    @property
    def options(self) -> list[dict[str, Any]]:
        return [each.options for each in self.pair if each.options]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engines:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_models(tmp_path)
    monkeypatch.chdir(tmp_path)
    return Engines(monkeypatch)


FLAGS = [
    LLAMA, "--skip-tokenizer-init", "--max-model-len", "1024", "--speculative-config",
    '{"method": "eagle3", "model": "EAGLE3-LLaMA3.1-Instruct-8B", "num_speculative_tokens": 5}',
    "--additional-config.graft.tree.nodes", "63",
]  # fmt: skip


def test_the_command_keeps_what_it_found(engines: Engines, capsys: Any) -> None:
    assert command.main([*FLAGS, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    [file] = proofs.folder().iterdir()
    assert json.loads(file.read_text()) == told
    assert told["parts"] == ["tree"]
    assert told["rows"] == {"a.b": "0123"}
    assert told["flags"]["drafts"]["method"] == "eagle3"
    alone, asked = engines.options
    assert "speculative_config" not in alone
    assert asked["additional_config"] == {"graft": {"tree": {"nodes": 15, "topk": 8, "steps": 4}}}
    assert {key: asked[key] for key in alone} == alone


def test_a_failure_is_kept_and_told(engines: Engines, capsys: Any, monkeypatch: Any) -> None:
    def finish(process: Process) -> Outcome:
        if process is engines.pair[1]:
            process.outcome.answers[0][1].tokens[2] = 1
        return process.outcome

    monkeypatch.setattr(Process, "finish", finish)
    assert command.main(FLAGS) == 1
    text = capsys.readouterr().out
    assert "WRONG: prompts, request 1: token 2 is 1" in text
    assert "FAILED" in text
    [proof] = proofs.of_this_machine()
    assert not proof.passed


def test_what_does_not_run_is_no_proof(engines: Engines, monkeypatch: Any) -> None:
    def finish(process: Process) -> Outcome:
        fails = process is engines.pair[1]
        return Outcome(error="RuntimeError: boom") if fails else process.outcome

    monkeypatch.setattr(Process, "finish", finish)
    assert command.main(FLAGS) == 1
    [proof] = proofs.of_this_machine()
    assert proof.differences == ["the engine with our parts fails: RuntimeError: boom"]
    monkeypatch.setattr(Process, "finish", lambda _: Outcome(error="boom"))
    with pytest.raises(GraftError, match="does not run without our parts: boom"):
        command.prove(FLAGS)


def test_flags_without_drafts_prove_nothing(engines: Engines, capsys: Any) -> None:
    model = [LLAMA, "--skip-tokenizer-init", "--max-model-len", "1024"]
    graft = ["--additional-config", '{"graft": {}}']
    assert command.main([*model, *graft]) == command.NOTHING
    assert "Nothing that a proof can show" in capsys.readouterr().out
    assert not engines.options


def test_a_model_alone_is_proven_with_a_preset(engines: Engines) -> None:
    proof = command.prove([*FLAGS[:-2]])
    assert (proof.parts, proof.flags["additional"]) == (["tree"], {"graft": "auto"})


def test_a_host_cache_alone_runs_beside_the_drafts_of_vllm(engines: Engines) -> None:
    proof = command.prove([*FLAGS[:-2], *CACHE])
    assert (proof.parts, proof.flags["additional"]) == (["hicache"], {})
    alone, asked = engines.options
    assert alone["speculative_config"] == asked["speculative_config"]
    assert asked["speculative_config"]["method"] == "eagle3"
    assert asked["additional_config"] == {"graft": {}}


@pytest.mark.parametrize(
    ("memory", "is_shown"), [("true", True), ("false", False), ('{"scope": "request"}', False)]
)
def test_a_memory_has_to_bring_drafts(engines: Engines, memory: str, is_shown: bool) -> None:
    tree = {"nodes": 63, "ngram": True, "memory": json.loads(memory)}
    graft = json.dumps({"graft": {"tree": tree}})
    proof = command.prove([*FLAGS[:-2], "--additional-config", graft])
    assert (proof.differences != []) == is_shown
    assert all("memory_nodes_accepted is 0" in each for each in proof.differences)


def test_a_request_is_preempted_before_the_deepest_tree_ends_it() -> None:
    [asked] = [each for each in rounds(cache=False) if each.preempt_at]
    # A step yields the tokens of a path, and one more.
    most = 1 + asked.preempt_at[0] * (arms._DEPTH + 1)
    assert most < questions._TOKENS


def test_a_proof_that_can_t_be_kept_is_told(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(SystemExit, match="can't be kept: NotADirectoryError"):
        command.main(FLAGS)
    assert "passed" in capsys.readouterr().out


def test_sizes_of_a_host_cache_are_small(engines: Engines) -> None:
    cache = {
        "kv_connector": "HiCacheConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_bytes": "64MiB", "load": "layerwise"},
    }
    command.main([*FLAGS, "--kv-transfer-config", json.dumps(cache)])
    _, asked = engines.options
    extra = asked["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra["load"] == "layerwise"
    assert extra["host_bytes"] == arms._HOST_TOKENS * 6 * 2 * 128 * 4


CACHE = [
    "--kv-transfer-config",
    '{"kv_connector": "HiCacheConnector", "kv_role": "kv_both", '
    '"kv_connector_extra_config": {"host_bytes": "64MiB"}}',
]


@pytest.mark.parametrize(
    "flags", [FLAGS, [*FLAGS[:-2], *CACHE, "--additional-config.graft", "auto"], [LLAMA, *CACHE]]
)
def test_a_start_looks_for_the_proof_of_its_flags(
    engines: Engines, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is looked for early, in the middle of vLLM's own checks, is what `prove` has written."""
    seen: list[Any] = []
    monkeypatch.setattr(permission, "vllm_version", lambda: "0.34.0")
    monkeypatch.setattr(permission, "differing", lambda *rooms: [])
    monkeypatch.setattr(proofs, "find", lambda config: seen.append(proofs.flags_of(config)))
    flags = [*flags, "--skip-tokenizer-init"]
    with inspecting():
        # A server adds no preset.
        config = Request.parse(flags, preset=False).create()
    assert len(seen) >= 1
    assert seen == [proofs.flags_of(config)] * len(seen)
    proof = command.prove(flags)
    assert proof.flags == seen[0]
