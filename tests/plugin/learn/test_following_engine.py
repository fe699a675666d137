"""A real engine follows a folder of heads: better ones stay, worse ones go, answers are one."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.checkpoints import with_noise, write_changed
from tests.support.engines.pairs import Pair, Request, answer_all
from vllm_graft.learn import follower
from vllm_graft.learn.learn_part import LEARNING
from vllm_graft.learn.publications import FACTS, WEIGHTS, Facts, Publications, digest
from vllm_graft.spec_decode.heads.fp8_head import quantize
from vllm_graft.testing import model_runner, spec_metrics

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]


def following(pair: Pair, base: Path, folder: Path, **tree: Any) -> Any:
    """An engine whose head follows a folder."""
    learn = {"follow": str(folder), "follow_trees": 100}
    return pair.engine(nodes=7, draft=str(base), tree=tree, graft={"learn": learn})


def restarted(pair: Pair, base: Path, folder: Path) -> Any:
    """Another engine of the same, whose trees a preset decides on where they are interpreted."""
    if pair.device == "cuda":
        return following(pair, base, folder)
    graft = {"preset": "auto", "learn": {"follow": str(folder)}}
    return pair.engine(chain=7, draft=str(base), additional_config={"graft": graft})


def numbers() -> Any:
    """What the engine of this process counts."""
    assert LEARNING.metrics.watch is not None
    return LEARNING.metrics.watch().numbers()


def test_heads_are_swapped_while_answers_stay_the_same(
    pair: Pair,
    samples: list[Request],
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = pair.on(device)
    with pair.engine() as llm:
        expected = answer_all(llm, samples)
    monkeypatch.setattr(follower, "LOOK_SECONDS", 0.01)
    good, folder = Path(pair.draft), tmp_path / "published"
    base = write_changed(good, tmp_path / "base", with_noise)
    none = write_changed(good, tmp_path / "none", lambda each: each * float("nan"))
    zero = write_changed(good, tmp_path / "zero", torch.zeros_like)
    shelf, key = Publications(folder), digest(base / WEIGHTS)

    def publish(head: Path) -> None:
        shelf.publish([head / WEIGHTS, head / "config.json"], Facts(key, 0, 1.5, 1.6, 60.0))

    def serve(llm: Any, until: Callable[[], bool], least: int = 0) -> None:
        end, rounds = time.monotonic() + 200, 0
        while (not until() or rounds < least) and time.monotonic() < end:
            assert answer_all(llm, samples) == expected
            rounds += 1
        assert until(), numbers()

    def verdict(number: int) -> str:
        file = folder / "heads" / f"{number:06d}" / "verdict"
        return file.read_text() if file.exists() else ""

    with following(pair, base, folder, head_dtype="fp8", hot_tokens=256) as llm:
        runner = model_runner(llm)
        draft, counters = runner.speculator.model, runner.speculator.context.counters
        rows, copies = draft.lm_head, runner.speculator.head.fp8.weight
        places = {name: each.data_ptr() for name, each in draft.named_parameters()}
        serve(llm, lambda: spec_metrics(llm).drafts > 50)
        old = copies.view(torch.uint8).clone()
        publish(good)
        serve(llm, lambda: verdict(1) == "kept")
        assert numbers()["head_swaps"] == 1
        # Everything that drafts is the new head's, the copies in FP8 at their old addresses too.
        assert torch.equal(rows.weight, load_file(good / WEIGHTS)["lm_head.weight"].to(rows.weight))
        whole, _ = quantize(rows.weight)
        assert runner.speculator.head.fp8.weight is copies
        assert torch.equal(copies.view(torch.uint8), whole.view(torch.uint8))
        assert not torch.equal(copies.view(torch.uint8), old)
        if device == "cuda":
            # The graphs that were captured read them there.
            found = {name: each.data_ptr() for name, each in draft.named_parameters()}
            assert found == places
            replays = counters.draft_replays
            assert answer_all(llm, samples) == expected
            assert counters.draft_replays > replays
        assert numbers()["head_yield"] > numbers()["head_yield_before"] + 0.1
        publish(none)
        serve(llm, lambda: verdict(2) == "refused", 2)
        assert (numbers()["unfit_heads"], numbers()["head_swaps"], numbers()["head"]) == (1, 1, 1)
        publish(zero)
        serve(llm, lambda: verdict(3) == "refused", 2)
        assert (numbers()["head_rollbacks"], numbers()["head_swaps"], numbers()["head"]) == (
            1,
            2,
            1,
        )
        assert torch.equal(copies.view(torch.uint8), whole.view(torch.uint8))
        del runner, draft, counters, rows, copies
    # A head of another base, and one that was not written to its end, are passed over.
    shelf.publish([good / WEIGHTS], Facts("another", 0, 1.0, 2.0, 1.0))
    (folder / "heads" / "000009").mkdir()
    (folder / "heads" / "000009" / FACTS).write_text(json.dumps({"base": key})[:-3])
    with restarted(pair, base, folder) as llm:
        assert (numbers()["head"], numbers()["head_trained_seconds"]) == (1, 60.0)
        rows = model_runner(llm).speculator.model.lm_head.weight
        assert torch.equal(rows, load_file(good / WEIGHTS)["lm_head.weight"].to(rows))
        assert answer_all(llm, samples) == expected
