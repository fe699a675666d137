"""Copies of a draft's output head follow weights that are replaced while an engine serves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.engines.pairs import Pair
from vllm_graft.spec_decode.heads.weight_updates import follow_weights


class Worker:
    """A worker of vLLM's with a head of ours, and what happens to both, in order."""

    def __init__(self, **speculator: Any) -> None:
        self.events: list[str] = []
        ours = {"head": SimpleNamespace(renew=lambda: self.events.append("renew"))}
        self.model_runner = SimpleNamespace(
            speculator=SimpleNamespace(**(speculator or ours)), reload_weights=self._reload
        )

    def _reload(self, path: str) -> str:
        self.events.append(path)
        return "done"

    def finish_weight_update(self) -> None:
        self.events.append("finish")


def test_copies_are_renewed_after_the_weights() -> None:
    worker: Any = Worker()
    for _ in range(2):
        follow_weights(worker)
    assert worker.model_runner.reload_weights("weights") == "done"
    worker.finish_weight_update()
    assert worker.events == ["weights", "renew", "finish", "renew"]


@pytest.mark.parametrize("speculator", [{"head": SimpleNamespace()}, {"other": None}])
def test_a_drafter_without_copies_changes_nothing(speculator: dict[str, Any]) -> None:
    worker: Any = Worker(**speculator)
    reload_weights = worker.model_runner.reload_weights
    follow_weights(worker)
    assert worker.model_runner.reload_weights is reload_weights


def test_weights_that_fail_to_load_leave_the_copies() -> None:
    worker: Any = Worker()

    def fail(path: str) -> None:
        raise ValueError(path)

    worker.model_runner.reload_weights = fail
    follow_weights(worker)
    with pytest.raises(ValueError, match="gone"):
        worker.model_runner.reload_weights("gone")
    assert worker.events == []


KINDS = ["fp8", "learned", "fp8 and learned", "file", "fp8 and file"]


@pytest.fixture(scope="module")
def hot_file(tmp_path_factory: pytest.TempPathFactory, pair: Pair) -> Path:
    file = tmp_path_factory.mktemp("hot") / "hot.txt"
    file.write_text("\n".join(map(str, range(0, 1000, 2))))
    return file


@pytest.mark.engine
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_loads_its_weights_again(pair: Pair, hot_file: Path, kind: str) -> None:
    """Reloading fills copies that were spoilt with what the weights say, at the same addresses."""
    from vllm_graft.testing import model_runner

    tree: dict[str, Any] = {"head_dtype": "fp8"} if "fp8" in kind else {}
    if "learned" in kind:
        tree["hot_tokens"] = 256
    if "file" in kind:
        tree["hot_tokens"] = str(hot_file)
    with pair.engine(nodes=7, tree=tree, max_num_seqs=2) as llm:
        head = model_runner(llm).speculator.head
        copies = copies_of(head)
        assert len(copies) == {"fp8": 2, "learned": 1, "fp8 and learned": 4, "file": 1}.get(kind, 2)
        before = [each.clone() for each in copies]
        for each in copies:
            each.zero_()
        llm.collective_rpc("reload_weights")
        found = copies_of(head)
        assert [each.data_ptr() for each in found] == [each.data_ptr() for each in copies]
        for each, expected in zip(found, before, strict=True):
            assert expected.any()
            assert torch.equal(each, expected)


def copies_of(head: Any) -> list[torch.Tensor]:
    """Return all copies of rows that a head has, those in FP8 as bytes."""
    found: list[torch.Tensor] = []
    if head.hot_weight is not None:
        found.append(head.hot_weight)
    if head.fp8 is not None:
        found += [head.fp8.weight.view(torch.uint8), head.fp8.scale]
    if head.learned is not None:
        rows = head.learned.rows
        if head.fp8 is None:
            found.append(rows.weight)
        else:
            found += [rows.rows.weight.view(torch.uint8), rows.rows.scale]
    return found
