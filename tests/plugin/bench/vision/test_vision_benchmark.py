"""The benchmark of vision encoders: its arms and turns, and requests to a tiny engine."""

import argparse
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.vision import standins, vision_models
from vllm_graft.bench.common.answers import Answer
from vllm_graft.bench.common.arm import Arm, table
from vllm_graft.bench.vision import command
from vllm_graft.bench.vision.command import Look, Looking, Seen, noise
from vllm_graft.testing import cpu_engine, model_runner


def given(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    arguments = parser.parse_args(["model", *words])
    arguments.output = arguments.plot = None
    return arguments


def test_arms_differ_in_how_the_encoder_runs_only() -> None:
    arguments = given("--options", '{"seed": 3, "compilation_config": {"mode": 0}}')
    found = {
        name: command.engine_options(command.read_arm(name, {"memory": 64}), arguments)
        for name in command.NAMES
    }
    assert found["off"]["compilation_config"] == {"mode": 0}
    assert found["stock"]["compilation_config"] == {"mode": 0, "cudagraph_mm_encoder": True}
    ours = found["ours"].pop("additional_config")
    assert ours == {"graft": {"vit": {"capture_share": 1, "memory": 64}}}
    assert found["ours"] == found["off"]
    compiled = found["ours+compile"]["compilation_config"]
    assert compiled == {"mode": 0, "compile_mm_encoder": True}
    assert all(each["enable_mm_processor_stats"] and each["seed"] == 3 for each in found.values())


class Engine:
    """A stand-in for an arm's process; the encoder takes longer from image to image."""

    def __init__(self, start: float, tokens: list[int]) -> None:
        self.asked: list[Look] = []
        self._start, self._tokens = start, tokens

    def send(self, wish: Any) -> None:
        if isinstance(wish, Look):
            self.asked.append(wish)

    def recv(self) -> Any:
        milliseconds = self._start + len(self.asked)
        return Seen(Answer(self._tokens, [0.5, 0.05]), milliseconds, 10 * milliseconds)


def test_warm_ups_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    pipes = {Arm("off"): Engine(10.0, [1, 2]), Arm("ours"): Engine(1.0, [1, 2])}
    monkeypatch.setattr(command.arm_processes, "start", lambda *_: pipes)
    rows, compared = command.compare(given("--sizes", "224", "--warm", "2"), Looking)
    assert table(rows, command.cell).splitlines()[1].split() == [
        "224",
        "14.00",
        "(140.0)",
        "5.00",
        "(50.0)",
        "2.80",
    ]
    assert [str(each) for each in compared] == ["ours: 3 of 3 greedy answers are those of off"]
    assert all([look.seed for look in each.asked] == [0, 1, 2, 3, 4] for each in pipes.values())


@pytest.mark.parametrize(("tokens", "status"), [([1, 9], 0), ([9, 2], 1)])
def test_a_difference_beyond_a_near_tie_fails(
    monkeypatch: pytest.MonkeyPatch, tokens: list[int], status: int
) -> None:
    pipes = {Arm("off"): Engine(10.0, [1, 2]), Arm("ours"): Engine(1.0, tokens)}
    monkeypatch.setattr(command.arm_processes, "start", lambda *_: pipes)
    assert command.run(given("--sizes", "224")) == status


def test_images_of_one_seed_are_equal() -> None:
    assert noise(64, 3).size == (64, 64)
    assert noise(64, 3).tobytes() == noise(64, 3).tobytes() != noise(64, 4).tobytes()


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["stock", "ours"])
def test_a_tiny_engine_says_the_same_in_graphs(tmp_path: Path, name: str) -> None:
    import torch
    import vllm.v1.worker.cpu.shm  # noqa: F401  It replaces parts of torch: before the stand-ins.
    from vllm.model_executor.models import qwen3_vl
    from vllm.platforms.cpu import CpuPlatform

    folder = vision_models.write_qwen3_vl(tmp_path / "model")
    arguments = given("--max-model-len", "512")
    arguments.options = {
        "enforce_eager": False,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 512,
        "limit_mm_per_prompt": {"image": 1, "video": 0},
        "compilation_config": {"mode": 0, "cudagraph_mode": "NONE"},
    }
    looks = [Look(size, seed, 4) for seed in range(3) for size in (64, 96)]
    seen: dict[str, list[Seen]] = {}
    graphs = classmethod(lambda cls: True)
    for each in ("off", name):
        options = command.engine_options(command.read_arm(each, {"max_patches": 256}), arguments)
        with (
            standins.cpu(),
            mock.patch.object(CpuPlatform, "support_static_graph_mode", graphs),
            mock.patch.object(qwen3_vl, "HAS_TRITON", False),
            cpu_engine(folder, **options) as llm,
        ):
            encoder = model_runner(llm).model_state.encoder_runner
            if encoder.cudagraph_manager is not None:
                # The CPU's worker captures nothing.
                encoder.cudagraph_manager.capture(graph_pool=torch.cuda.graph_pool_handle())
            looking = Looking(llm, vision_models.QWEN_PROMPT)
            seen[each] = [looking(look) for look in looks]
            counters = looking("counters") if each == "ours" else {}
            del encoder, looking
    assert all(0 < each.encoder_ms < each.request_ms for found in seen.values() for each in found)
    texts = {each: [one.answer.tokens for one in found] for each, found in seen.items()}
    assert texts[name] == texts["off"]
    assert len({tuple(tokens) for tokens in texts["off"]}) > 2
    # Each size is seen, captured, and replayed.
    if name == "ours":
        assert counters["items"] == {"bucket": 2, "eager": 2, "exact": 2}
