"""The flags of `plan` and the command that it prints; the GPU that it is told."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import write_configs
from tests.support.engines.cache_engines import transfer
from vllm_graft.base.errors import ConfigError
from vllm_graft.cli import main
from vllm_graft.plan.gpu import Gpu, pretend
from vllm_graft.plan.memory import Memory
from vllm_graft.plan.planning import PartPlan, Plan, Verdict, render
from vllm_graft.plan.request import Request


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_configs(tmp_path_factory.mktemp("models"))[0])


@pytest.mark.parametrize(
    ("given", "additional"),
    [
        ([], {"graft": "auto"}),
        (["--additional-config.other", "1"], {"other": 1, "graft": "auto"}),
        (["--additional-config", '{"other": 1}'], {"other": 1, "graft": "auto"}),
        (["--additional-config.graft", "latency"], {"graft": "latency"}),
        (["--additional-config.graft.tree.topk", "2"], {"graft": {"tree": {"topk": 2}}}),
    ],
)
def test_the_command_asks_for_what_was_planned(
    model: str, given: list[str], additional: dict[str, Any]
) -> None:
    request = Request.parse([model, *given])
    assert request.engine.additional_config == additional
    serve = shlex.split(request.command)
    assert serve[:3] == ["vllm", "serve", model]
    again = Request.parse(serve[2:])
    assert again.engine.additional_config == additional
    assert again.command == request.command


def test_the_host_cache_alone_keeps_the_preset(model: str) -> None:
    request = Request.parse([model, "--kv-transfer-config", json.dumps(transfer())])
    assert request.engine.additional_config == {"graft": "auto"}


def test_a_flag_that_vllm_does_not_know(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        Request.parse([model, "--no-such-flag"])
    assert ended.value.code == 2
    assert "--no-such-flag" in capsys.readouterr().err


def test_a_gpu_is_read() -> None:
    assert Gpu.parse("9.0:80GiB") == Gpu((9, 0), 80 << 30)
    assert Gpu.parse("h100") == Gpu((9, 0), 79 << 30)
    assert str(Gpu.parse("8.6:24GiB")) == "a GPU of compute capability 8.6 with 24 GiB"


@pytest.mark.parametrize("text", ["", "H1000", "9:80GiB", "9.0:", "9.0:many", "9.0:0"])
def test_another_text_is_no_gpu(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--gpu 9\.0:80GiB"):
        Gpu.parse(text)


def test_a_process_has_one_platform() -> None:
    import vllm.platforms

    assert vllm.platforms.current_platform.device_type
    with pytest.raises(ConfigError, match="comes too late"):
        pretend(Gpu.parse("9.0:80GiB"))


def test_the_report_says_why_a_server_would_not_start() -> None:
    part = PartPlan("tree", "refused", "It can't.")
    plan = Plan(Verdict.REFUSED, "this machine (cpu)", refused="It can't.", parts=[part])
    text = render(plan)
    assert "refused: the server would not start.\nIt can't." in text
    assert "serve it with" not in text


def test_sizes_have_units() -> None:
    rows = [Memory("a", 3 << 29, "rank", "x"), Memory("b", 512, "token", "y")]
    text = render(Plan(Verdict.OFF, "d", command="c", memory=[*rows, Memory("c", None, "r", "z")]))
    assert "1.5 GiB per rank" in text
    assert "512 B per token" in text
    assert "unknown" in text


def test_the_command_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["plan", model, "--json", "--skip-tokenizer-init"])
    said = capsys.readouterr()
    told = json.loads(said.out.splitlines()[-1])
    assert said.err.startswith(f"Reading the configuration of {model} for this machine")
    assert (status, told["verdict"], told["status"]) == (0, "on", 0)
    assert main(["plan", "--help"]) == 0
    assert "Exit status" in capsys.readouterr().out
    assert Path(model).name in told["command"]


@pytest.mark.parametrize("draft", [False, True])
def test_a_model_that_is_not_there_is_one_sentence(
    model: str, draft: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = {"method": "eagle3", "model": "no/such-model", "num_speculative_tokens": 3}
    given = [model, "--speculative-config", json.dumps(found)] if draft else ["no/such-model"]
    assert main(["plan", *given, "--skip-tokenizer-init"]) == 1
    *_, refused, says = capfd.readouterr().out.splitlines()
    assert refused == "refused: the server would not start."
    assert says.startswith("no/such-model is not there: it is no folder of this machine")


def test_a_folder_without_a_configuration_is_told_from_one_that_is_missing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "params.json").write_text("{}")
    assert main(["plan", str(tmp_path), "--skip-tokenizer-init"]) == 1
    says = capfd.readouterr().out.splitlines()[-1]
    assert says.startswith(f"{tmp_path} has no configuration that vLLM finds: config.json")
