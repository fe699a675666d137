"""The benchmark of vision encoders: its arms and turns, and requests to a tiny engine."""

import argparse
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from vllm.renderers.hf import ChatTemplateResolutionError

from tests.support.vision import standins, vision_models
from vllm_graft.bench.common.answers import Answer
from vllm_graft.bench.common.arm import Arm, table
from vllm_graft.bench.common.report import BenchmarkError
from vllm_graft.bench.common.serve_flags import Serving
from vllm_graft.bench.vision import command
from vllm_graft.bench.vision.command import Look, Looking, Seen, noise
from vllm_graft.testing import cpu_engine, model_runner, write_llama


def given(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    arguments = parser.parse_args(words)
    arguments.files = []
    arguments.output = arguments.plot = None
    return arguments


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(vision_models.write_qwen3_vl(tmp_path_factory.mktemp("models") / "model"))


def test_arms_differ_in_how_the_encoder_runs_only(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms.cpu import CpuPlatform

    monkeypatch.setattr(CpuPlatform, "support_static_graph_mode", classmethod(lambda cls: True))
    flags = ["--seed", "3", "--compilation-config", '{"mode": 0}', "--skip-tokenizer-init"]
    flags += ["--additional-config.graft.vit.memory", "64"]
    given = Serving.read([model, *flags])
    arms = {name: command.read_arm(name, given) for name in command.NAMES}
    found = {name: dict(arm.options) for name, arm in arms.items()}
    ours = found["ours"].pop("additional_config")
    assert ours == {"graft": {"vit": {"capture_share": 1, "memory": 64}}}
    assert found["ours"] == found["off"]
    keys = ("mode", "cudagraph_mm_encoder", "compile_mm_encoder")
    compiled = {
        name: [getattr(each["compilation_config"], key) for key in keys]
        for name, each in found.items()
    }
    assert compiled["off"] == [0, False, False]
    assert compiled["stock"] == [0, True, False]
    assert compiled["ours+compile"] == [0, False, True]
    assert all(each["enable_mm_processor_stats"] and each["seed"] == 3 for each in found.values())
    # They go to a process of the arm's own.
    sent = pickle.loads(pickle.dumps(found["stock"]))
    assert sent["compilation_config"].cudagraph_mm_encoder
    # A server keeps the share of captures that it has.
    assert "capture_share" not in arms["ours"].commands["ours"]
    assert '"memory": 64' in arms["ours"].commands["ours"]
    assert "graft" not in arms["stock"].commands["stock"]


def test_images_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BenchmarkError, match="there is no image in it"):
        command.read_images(tmp_path / "none")
    for number in (2, 1):
        noise(8 * number, number).save(tmp_path / f"{number}.PNG")
    (tmp_path / "read.me").write_text("no image")
    files = command.read_images(tmp_path)
    assert [file.name for file in files] == ["1.PNG", "2.PNG"]
    assert command.picture(Look(files[1], 0, 4)).size == (16, 16)
    pipes = {Arm("off", OPTIONS): Engine(10.0, [1, 2]), Arm("ours", OPTIONS): Engine(1.0, [1, 2])}
    monkeypatch.setattr(command.arm_processes, "start", lambda *_: pipes)
    arguments = given("--images", str(tmp_path), "--warm", "1", "--rounds", "1")
    arguments.files = files
    rows, [compared] = command.compare([*pipes], "model", arguments, Looking)
    # The third and the fourth image of each arm; the mean of both.
    assert [(row.case, row.main[1]) for row in rows] == [
        ({"images": 2}, 13.5),
        ({"images": 2}, 4.5),
    ]
    assert compared.equal == 2
    (tmp_path / "3.png").write_text("no image either")
    with pytest.raises(BenchmarkError, match=r"3\.png can't be read"):
        command.read_images(tmp_path)


OPTIONS = {"max_model_len": 64}


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
    pipes = {Arm("off", OPTIONS): Engine(10.0, [1, 2]), Arm("ours", OPTIONS): Engine(1.0, [1, 2])}
    monkeypatch.setattr(command.arm_processes, "start", lambda *_: pipes)
    arguments = given("--sizes", "224", "--warm", "2")
    rows, compared = command.compare([*pipes], "model", arguments, Looking)
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


def test_answers_of_as_many_rounds_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    arms, rounds = [Arm("off", OPTIONS), Arm("ours", OPTIONS)], iter((5, 3))
    monkeypatch.setattr(command, "groups", lambda *_: [[arm] for arm in arms])
    started = iter([{arm: Engine(1.0, [1, 2])} for arm in arms])
    monkeypatch.setattr(command.arm_processes, "start", lambda *_: next(started))
    monkeypatch.setattr(command.TimeLimit, "rounds", lambda *_, **__: range(next(rounds)))
    _, compared = command.compare(arms, "model", given("--sizes", "224", "--warm", "2"), Looking)
    assert [str(each) for each in compared] == ["ours: 1 of 1 greedy answers are those of off"]


@pytest.mark.parametrize(("tokens", "status"), [([1, 9], 0), ([9, 2], 1)])
def test_a_difference_beyond_a_near_tie_fails(
    monkeypatch: pytest.MonkeyPatch, tokens: list[int], status: int
) -> None:
    pipes = {Arm("off", OPTIONS): Engine(10.0, [1, 2]), Arm("ours", OPTIONS): Engine(1.0, tokens)}
    monkeypatch.setattr(command.arm_processes, "start", lambda *_: pipes)
    arms = iter(pipes)
    monkeypatch.setattr(command, "read_arm", lambda *_: next(arms))
    monkeypatch.setattr(command.Serving, "read", lambda *_: SimpleNamespace(model="model"))
    arguments = given("--sizes", "224", "--arms", "off", "ours")
    assert command.run(arguments, ["model"]) == status


class Untaught:
    """An engine of a model without a template for chats."""

    renderer = SimpleNamespace(
        get_mm_processor=lambda: SimpleNamespace(
            dummy_inputs=SimpleNamespace(get_dummy_text=lambda counts: "<image>" * counts["image"])
        )
    )

    def __init__(self, why: Exception) -> None:
        self._why, self.asked, self.refused = why, list[Any](), 0

    def chat(self, *_: Any, **__: Any) -> Any:
        self.refused += 1
        raise self._why

    def generate(self, requests: list[Any], *_: Any, **__: Any) -> list[Any]:
        self.asked += requests
        said = SimpleNamespace(token_ids=[7], logprobs=[{7: SimpleNamespace(logprob=-0.1)}])
        return [SimpleNamespace(outputs=[said])]

    def collective_rpc(self, _: str) -> list[dict[str, Any]]:
        return [{"a": {"encoder_forward_secs": 0.002}}]


def test_a_model_without_a_template_is_asked_by_its_placeholder(
    capsys: pytest.CaptureFixture[str],
) -> None:
    llm = Untaught(ChatTemplateResolutionError("there is none"))
    looking = Looking(llm, None)
    assert [looking.look(Look(16, seed, 1)).encoder_ms for seed in range(2)] == [2.0, 2.0]
    assert [each["prompt"] for each in llm.asked] == ["<image>What is it?"] * 2
    assert (llm.refused, capsys.readouterr().out.count("no chat template")) == (1, 1)
    # A template that fails is an error, and a text that is given is asked.
    with pytest.raises(ValueError, match="roles must alternate"):
        Looking(Untaught(ValueError("roles must alternate")), None).look(Look(16, 0, 1))
    told = Untaught(ValueError("no chat is asked for"))
    Looking(told, "<it>").look(Look(16, 0, 1))
    assert [each["prompt"] for each in told.asked] == ["<it>"]


def test_a_given_template_goes_to_all_arms_and_text_alone_is_refused(
    model: str, tmp_path: Path
) -> None:
    given = Serving.read([model, "--chat-template", "{{ messages }}"])
    assert command.read_arm("off", given).options["chat_template"] == "{{ messages }}"
    text = str(write_llama(tmp_path))
    with pytest.raises(BenchmarkError, match="takes text alone: give a model that takes images"):
        command.read_arm("ours", Serving.read([text]))


def test_images_of_one_seed_are_equal() -> None:
    assert noise(64, 3).size == (64, 64)
    assert noise(64, 3).tobytes() == noise(64, 3).tobytes() != noise(64, 4).tobytes()


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["stock", "ours"])
def test_a_tiny_engine_says_the_same_in_graphs(model: str, name: str) -> None:
    import torch
    import vllm.v1.worker.cpu.shm  # noqa: F401  It replaces parts of torch: before the stand-ins.
    from vllm.model_executor.models import qwen3_vl
    from vllm.platforms.cpu import CpuPlatform

    more = {
        "enforce_eager": False,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 512,
        "limit_mm_per_prompt": {"image": 1, "video": 0},
    }
    flags = ["--max-model-len", "512", "--additional-config.graft.vit.max_patches", "256"]
    flags += ["--compilation-config", '{"mode": 0, "cudagraph_mode": "NONE"}']
    looks = [Look(size, seed, 4) for seed in range(3) for size in (64, 96)]
    seen: dict[str, list[Seen]] = {}
    graphs = classmethod(lambda cls: True)
    for each in ("off", name):
        with mock.patch.object(CpuPlatform, "support_static_graph_mode", graphs):
            options = {**command.read_arm(each, Serving.read([model, *flags])).options, **more}
        with (
            standins.cpu(),
            mock.patch.object(CpuPlatform, "support_static_graph_mode", graphs),
            mock.patch.object(qwen3_vl, "HAS_TRITON", False),
            cpu_engine(model, **options) as llm,
        ):
            encoder = model_runner(llm).model_state.encoder_runner
            if encoder.cudagraph_manager is not None:
                # The CPU's worker captures nothing.
                encoder.cudagraph_manager.capture(graph_pool=torch.cuda.graph_pool_handle())
            # Without a template for chats vLLM knows the placeholder.
            looking = Looking(llm, vision_models.QWEN_PROMPT if name == "ours" else None)
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
