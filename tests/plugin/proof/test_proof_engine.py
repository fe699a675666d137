"""The proof on a CPU: it passes as things are, and fails for each of the planted faults."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.plugin.plan.stranger_models import LLAMA, write_models
from tests.support.planted_faults import FAULTS, Fault, rounds_until
from vllm_graft.base.errors import SeamError
from vllm_graft.base.log import info_once, logger
from vllm_graft.plan.request import Request, inspecting
from vllm_graft.proof.arms import Arms, make_arms
from vllm_graft.proof.engine_process import running
from vllm_graft.proof.questions import Answer, Asking, Round, rounds
from vllm_graft.proof.verdict import differences, undone
from vllm_graft.seams import compare, permission, proofs, versions
from vllm_graft.seams.compare import Seam
from vllm_graft.seams.permission import proving, require_seams
from vllm_graft.testing.engine import default_options

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROUNDS = list(rounds(cache=True))


def flags(folder: Path) -> list[str]:
    """What would follow `vllm serve`: trees of an EAGLE-3 head, and a host cache with storage."""
    draft = {"method": "eagle3", "model": str(folder / "EAGLE3-LLaMA3.1-Instruct-8B")}
    extra = {
        "host_bytes": "1GiB",
        "storage": {"backend": "segments", "path": "/nowhere", "max_bytes": "1GiB"},
    }
    cache = {"kv_connector": "HiCacheConnector", "kv_role": "kv_both"}
    return [
        str(folder / LLAMA), "--skip-tokenizer-init", "--max-model-len", "1024",
        "--speculative-config", json.dumps({**draft, "num_speculative_tokens": 4}),
        "--additional-config", json.dumps({"graft": {"tree": {"topk": 4, "nodes": 15}}}),
        "--kv-transfer-config", json.dumps({**cache, "kv_connector_extra_config": extra}),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> Arms:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    with inspecting():
        request = Request.parse(flags(folder))
        config = request.create()
    return make_arms(request.engine, config, {"tree", "hicache"}, tmp_path_factory.mktemp("arms"))


@pytest.fixture(scope="module")
def expected(arms: Arms) -> dict[str, list[Answer]]:
    """The answers without our parts, by the round's name."""
    with running(arms.target, arms.alone) as llm:
        found = Asking(llm, told=True).ask(ROUNDS)
    return {each.name: answers for each, answers in zip(ROUNDS, found)}


MOVED = "v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler._get_logprobs_tensors"


@pytest.fixture(scope="module")
def next_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Take the installed vLLM for a 0.34 in which one symbol has another text."""
    installed = compare.ledger_at(compare.vllm_version())
    [row] = [each for each in installed if each.path == MOVED]
    assert row.kind == "order"
    other = replace(row, expected=f"{row.expected}, and_what_comes_after(")
    ledger = [each if each is not row else other for each in installed]

    def ledger_at(version: str, rows: Sequence[Seam] | None = None) -> list[Seam]:
        paths = {each.path for each in compare.LEDGER if rows is None or each in rows}
        return [each for each in ledger if each.path in paths]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        for module in (permission, proofs):
            patch.setattr(module, "vllm_version", lambda: "0.34.0+cpu")
        for module in (compare, versions):
            patch.setattr(module, "ledger_at", ledger_at)
        versions.differing.cache_clear()
        yield
    versions.differing.cache_clear()


@pytest.fixture(scope="module")
def ours(arms: Arms, expected: Any, next_vllm: None) -> Iterator[Any]:
    """The engine with our parts, on a vLLM that was proven and not tested."""
    with pytest.raises(SeamError, match=rf"{MOVED}.*`vllm-graft prove"):
        running(arms.target, arms.asked).__enter__()
    with proving() as seen:
        require_seams("core", "tree", "hicache")
        options = {**default_options(), **arms.asked}
        EngineArgs(model=str(arms.target), **options).create_engine_config()
    assert list(seen.rows) == [MOVED]
    about = proofs.Machine.here(), seen.flags, ["tree", "hicache"], seen.rows
    proofs.Proof(*about, [], {}, "", "2026-11-28", 1.0).keep()
    info_once.cache_clear()
    with mock.patch.object(logger, "log") as log, running(arms.target, arms.asked) as llm:
        said = [call.args[1] for call in log.call_args_list]
        assert [each for each in said if "tree, hicache were proven on this" in each]
        yield llm


def judged(llm: Any, asked: list[Round], expected: dict[str, list[Answer]]) -> list[str]:
    found = Asking(llm, told=False).ask(asked)
    return list(differences(asked, found, [expected[each.name] for each in asked], "float32"))


def test_it_passes_as_things_are(ours: Any, arms: Arms, expected: dict[str, list[Answer]]) -> None:
    asking = Asking(ours, told=False)
    assert judged(ours, ROUNDS, expected) == []
    assert list(undone(asking.counts(), arms.wanted)) == []
    assert len(arms.wanted) == 5


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            each,
            id=each.name,
            marks=[] if each.round == "seeds" or "slots" in each.name else pytest.mark.nightly,
        )
        for each in FAULTS
    ],
)
def test_it_fails_for_a_planted_fault(
    ours: Any, expected: dict[str, list[Answer]], fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = rounds_until(iter(ROUNDS), fault.round)
    with monkeypatch.context() as patch:
        fault.plant(patch)
        wrong = judged(ours, asked, expected)
    assert any(fault.round in each for each in wrong)
