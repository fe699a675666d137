"""The proof of vision graphs on a CPU, where recordings stand for graphs; planted faults."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.plugin.plan.stranger_models import MODELS
from tests.support.planted_faults import SIGHT_FAULTS, Fault
from tests.support.vision import towers, vision_models
from vllm_graft.base.errors import GraftError
from vllm_graft.plan.request import Request, inspecting
from vllm_graft.proof.arms import Arms, make_arms
from vllm_graft.proof.engine_process import running
from vllm_graft.proof.questions import Answer, Asking, Round, rounds
from vllm_graft.proof.verdict import broken, differences, undone
from vllm_graft.testing import model_runner

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

NO_GRAPHS = {"mode": 0, "cudagraph_mode": "NONE"}


@pytest.fixture(scope="module", autouse=True)
def recordings() -> Iterator[None]:
    from vllm.model_executor.models import qwen3_vl
    from vllm.platforms.cpu import CpuPlatform

    there = classmethod(lambda cls: True)
    with (
        mock.patch.object(CpuPlatform, "support_static_graph_mode", there),
        mock.patch.object(qwen3_vl, "HAS_TRITON", False),
        towers.fake_backend(),
    ):
        yield


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What people serve, beside a processor with another vocabulary."""
    made = vision_models.write_qwen3_vl(tmp_path_factory.mktemp("served") / "q", weights=False)
    (made / "config.json").write_text(json.dumps(MODELS["Qwen3-VL-8B-Instruct"]))
    return made


def arms_of(served: Path, folder: Path, *flags: str) -> Arms:
    given = [str(served), "--max-model-len", "1024", "--compilation-config", json.dumps(NO_GRAPHS)]
    section = json.dumps({"graft": {"vit": {"memory": 64}}})
    with inspecting():
        request = Request.parse([*given, *flags, "--additional-config", section], preset=False)
        config = request.create()
    return make_arms(request.engine, config, {"vit"}, folder)


@pytest.fixture(scope="module")
def arms(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Arms:
    return arms_of(served, tmp_path_factory.mktemp("arms"))


@pytest.fixture(scope="module")
def asked(arms: Arms) -> list[Round]:
    """The rounds about images, as they reach the processes of the engines."""
    found = [each for each in rounds(cache=False, look=arms.look) if each.name.startswith("images")]
    assert len(found) == 4
    made: list[Round] = pickle.loads(pickle.dumps(found))
    return made


@contextlib.contextmanager
def engine(arms: Arms, options: dict[str, Any]) -> Iterator[Any]:
    # A worker on a CPU captures nothing.
    graphs = {"enforce_eager": False, "compilation_config": NO_GRAPHS}
    with running(arms.target, {**options, **graphs}) as llm:
        manager = model_runner(llm).model_state.encoder_runner.cudagraph_manager
        if manager is not None:
            manager.capture(graph_pool=None)
        del manager
        yield llm


@pytest.fixture(scope="module")
def expected(arms: Arms, asked: list[Round]) -> list[list[Answer]]:
    with engine(arms, arms.alone) as llm:
        assert model_runner(llm).model_state.encoder_runner.cudagraph_manager is None
        return Asking(llm, told=True).ask(asked)


def judged(arms: Arms, asked: list[Round], expected: Any, dtype: str) -> list[str]:
    with engine(arms, arms.asked) as llm:
        asking = Asking(llm, told=False)
        found = asking.ask(asked)
        counts = asking.counts()
    wanted = {name: what for name, what in arms.wanted.items() if "vit" in name}
    assert len(wanted) == 1
    return [
        *differences(asked, found, expected, dtype),
        *broken(counts),
        *undone(counts, {**wanted, "vllm:graft_vit_replays/bucket": "padded graphs"}),
    ]


def test_it_passes_as_things_are(arms: Arms, asked: list[Round], expected: Any) -> None:
    assert judged(arms, asked, expected, "float32") == []
    # What is in an image counts: no two rounds have one answer.
    assert len({str(each[0].logprobs) for each in expected}) == len(asked)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "fault",
    [pytest.param(each, id=each.name) for each in SIGHT_FAULTS],
)
def test_it_fails_for_a_planted_fault(
    arms: Arms, asked: list[Round], expected: Any, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with the tolerance for 16 bits, in which a GPU proves it."""
    with monkeypatch.context() as patch:
        fault.plant(patch)
        wrong = judged(arms, asked, expected, "bfloat16")
    assert any(fault.round in each for each in wrong), wrong


def test_a_model_without_a_processor_is_told(served: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((served / "config.json").read_text())
    with pytest.raises(GraftError, match="Images can't be proven without a processor: "):
        arms_of(tmp_path, tmp_path / "arms", "--skip-tokenizer-init")
