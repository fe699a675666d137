"""The command: what it refuses before a model loads, and a run from texts to a head."""

import json
import os
import shlex
import shutil
import sys
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.launcher.api import LaunchConfig

from tests.plugin.train.small_runs import job_of, target_of
from tests.support.engines.pair_server import require_cpu_server, server_settings
from tests.support.engines.shipped_pair import SHIPPED
from tests.support.models.latent_models import write_target as write_latent
from tests.support.models.window_models import write_gemma3
from tests.support.processes import finished
from vllm_graft.base.errors import ConfigError
from vllm_graft.testing.models.llama import write_llama
from vllm_graft.train import command, target_answers
from vllm_graft.train.job import FILE, Job
from vllm_graft.train.target import read_layers
from vllm_graft.train.texts import read_texts

TARGET = str(SHIPPED / "target")
RUN = command._finished


@pytest.fixture
def texts(tmp_path: Path) -> str:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(20)))
    return str(file)


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be loaded; variables and signals stay as they are."""
    started: Any = lambda commands: pytest.fail(f"{commands} was started")  # noqa: E731
    monkeypatch.setattr(command, "_finished", started)
    monkeypatch.setattr(command, "_QUIET", {})
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)


def refusal(*arguments: str) -> str:
    """What the command says and ends with."""
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code not in (0, None)
    return str(ended.value.code)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--minutes", "-1"], "--minutes is -1.0: give a number from 0.01 on"),
        (["--passes", "0"], "--passes is 0: give a number from 1 on"),
        (["--temperatures", "0.7"], "--temperatures is 0.7: give numbers from 0 to 2, 0 among"),
        (["--batch-tokens", "100"], "--batch-tokens is 100, and a text may have --longest 1024"),
        (["--disk", "much"], "--disk is 'much': give a size, as 200GiB"),
        (["--from-traffic", ".", "--newest", "few"], "--newest is 'few': give a size, as 200GiB"),
        (["--disk", "1KiB"], "has 1.0 KiB for states, and 20000 tokens take"),
        (["--speculative-config", "{}"], "--speculative-config is given, and training sets it"),
        (["--states", "/dev/null/x"], "can't be made"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, texts: str, more: list[str], says: str) -> None:
    out = str(tmp_path / "head")
    assert says in refusal(TARGET, "--texts", texts, "--out", out, *more)


def test_a_head_that_training_can_t_go_on_with_is_refused(tmp_path: Path, texts: str) -> None:
    def said(head: Path) -> str:
        given = ["--texts", texts, "--out", str(tmp_path / "head"), "--start-from", str(head)]
        return refusal(TARGET, *given)

    assert "has no head that training can go on with: FileNotFoundError" in said(tmp_path)
    config = json.loads((SHIPPED / "eagle3" / "config.json").read_text())
    for name, change, says in (
        ("residual", {"norm_before_residual": True}, "norm_before_residual or a rope_type"),
        ("rope", {"rope_parameters": {"rope_type": "llama3"}}, "norm_before_residual or a rope"),
        ("size", {"hidden_size": 64}, "size mismatch"),
        ("vocabulary", {"vocab_size": 4096}, "has a vocab_size of 4096, and MODEL"),
    ):
        other = shutil.copytree(SHIPPED / "eagle3", tmp_path / name)
        (other / "config.json").write_text(json.dumps({**config, **change}))
        assert says in said(other)


def test_folders_of_something_else_are_refused(tmp_path: Path, texts: str) -> None:
    said = refusal(TARGET, "--texts", texts, "--out", str(tmp_path))
    assert "has files of something else ('texts.jsonl')" in said
    (tmp_path / "states" / "head").mkdir(parents=True)
    (tmp_path / "states" / "head" / "precious").touch()
    more = ["--states", str(tmp_path / "states")]
    said = refusal(TARGET, "--texts", texts, "--out", str(tmp_path / "head"), *more)
    assert "states/head has files of something else" in said
    assert "is a file" in refusal(TARGET, "--texts", texts, "--out", texts)


def test_models_that_no_head_can_be_trained_for_are_refused(tmp_path: Path, texts: str) -> None:
    def said(model: Path) -> str:
        return refusal(str(model), "--texts", texts, "--out", str(tmp_path / "head"))

    assert "nothing/here" in said(Path("nothing/here"))
    assert "whose attention is MLA" in said(write_latent(tmp_path / "latent"))
    assert "gives drafts no hidden states" in said(write_gemma3(tmp_path / "gemma"))
    model = write_llama(tmp_path / "model")
    (model / "model.safetensors").rename(model / "pytorch.bin")
    assert "has neither model.safetensors.index.json nor model.safetensors" in said(model)
    index = {"weight_map": {"some.weight": "a.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "no embedding beside a last norm among its tensors" in said(model)


def test_a_full_disk_is_told_before(
    tmp_path: Path, texts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = SimpleNamespace(total=2**40, used=2**40, free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    said = refusal(TARGET, "--texts", texts, "--out", str(tmp_path / "head"))
    assert "1000 B free, and checkpoints of this head take" in said


def test_another_job_does_not_go_on(
    tmp_path: Path, texts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Started(Exception):
        pass

    def start(commands: Any) -> None:
        raise Started

    monkeypatch.setattr(command, "_finished", start)
    given = [TARGET, "--texts", texts, "--out", str(tmp_path / "head")]
    for more in ([], ["--minutes", "5", "--save-seconds", "7"]):
        with pytest.raises(Started):
            command.main([*given, *more])
    said = refusal(*given, "--passes", "4")
    assert "begun with other settings: --passes was 6 and is 4" in said


@pytest.mark.parametrize(("seconds", "is_told"), [(30, True), (300, False)])
def test_too_little_time_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seconds: int,
    is_told: bool,
) -> None:
    monkeypatch.setattr(command, "_finished", lambda commands: None)
    command._train(job_of(tmp_path, SHIPPED / "target"), time.time() + seconds)
    assert ("with more --minutes" in capsys.readouterr().err) is is_told


def test_layers_that_a_head_reads_are_three() -> None:
    assert read_layers(32) == (2, 16, 29)
    assert read_layers(4) == (1, 2, 3)
    for count in range(2, 40):
        layers = read_layers(count)
        assert len({*layers}) == 3
        assert list(layers) == sorted(layers)
        assert {*layers} <= {*range(count + 1)}


def test_the_ends_of_a_target_are_found_in_its_files(tmp_path: Path) -> None:
    target = target_of(write_llama(tmp_path / "target"))
    ends = target.embedding, target.norm, target.output
    assert ends == ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    assert target.files.keys() == {*ends}
    assert target.token_bytes == 4 * 64 * 2


def test_engines_share_the_questions(tmp_path: Path) -> None:
    from vllm_graft.train.target_answers import Questions

    job = job_of(tmp_path)
    tokenizer = SimpleNamespace(encode=lambda text: [*text.encode()][:60])
    each = [Questions(job, tokenizer, part, 3) for part in range(3)]
    whole = Questions(job, tokenizer, 0, 1)
    for kind in ("own", "written"):
        alone = sorted(getattr(whole, kind), key=lambda asked: asked[0].number)
        shared = [asked for one in each for asked in getattr(one, kind)]
        assert sorted(shared, key=lambda asked: asked[0].number) == alone
        assert len(alone) == len({entry.number for entry, _ in alone}) > 20
    # Those that leave an answer less than half of the room are counted, however often they come.
    long = Questions(job, SimpleNamespace(encode=lambda text: [0] * 65), 0, 1)
    assert not [*long.own]
    assert len(long.too_long) == len(read_texts(job.texts, job.longest)[0]) > 20
    assert not whole.too_long


def test_each_engine_tells_of_the_questions_that_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, counts = job_of(tmp_path), []

    def looked_at(asked: Any, *_: Any) -> None:
        deque(asked, maxlen=0)

    monkeypatch.setattr(
        target_answers, "Answering", lambda *_, **__: SimpleNamespace(ask=looked_at)
    )
    llm: Any = SimpleNamespace(get_tokenizer=lambda: SimpleNamespace(encode=lambda text: [0] * 65))
    for part in range(3):
        target_answers.answer_all(llm, job, part, 3, shows=part == 0)
        count, rest = capsys.readouterr().out.split(" ", 1)
        assert rest.startswith(f"questions of part {part + 1} of 3 have more than 64 tokens")
        counts.append(int(count))
    assert sum(counts) == len(read_texts(job.texts, job.longest)[0])


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_head_is_made_of_texts(tmp_path: Path) -> None:
    require_cpu_server()
    prompts = json.loads((SHIPPED / "prompts.json").read_text())
    (tmp_path / "texts.json").write_text(json.dumps(prompts))
    flags, environment = server_settings(SHIPPED, cuda=False)
    environment |= {"OMP_NUM_THREADS": "1"}
    own = ["--minutes", "5", "--answer-minutes", "0.1", "--steps", "4", "--max-tokens", "12"]
    own += ["--longest", "96", "--batch-tokens", "512", "--passes", "2", "--draft-vocab", "300"]
    out = tmp_path / "head"
    told = finished(
        *(sys.executable, "-m", "vllm_graft", "train", flags[0], *own),
        *("--texts", tmp_path / "texts.json", "--out", out, "--dtype", "float32"),
        *("--enforce-eager", "--max-num-seqs", "8"),
        env={**os.environ, **environment},
    )
    assert "held out, temperature 0: acceptance length" in told
    serve = ["vllm", "serve", str(Path(flags[0]).resolve()), "--additional-config.graft", "auto"]
    assert shlex.join(serve) in told
    names = {"config.json", "model.safetensors", "training.json"}
    assert {each.name for each in out.iterdir()} == {
        *names,
        "tokenizer.json",
        "tokenizer_config.json",
    }
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    found = SpeculatorsConfig.from_pretrained(str(out))
    assert found.architectures == ["Eagle3LlamaForCausalLM"]
    assert (found.draft_vocab_size, found.eagle_aux_hidden_state_layer_ids) == (300, [2, 3, 5])
    assert json.loads((out / "training.json").read_text())["steps"] == 4


@pytest.mark.parametrize("kept", ["[]", "null", "3", '"x"', "{"])
def test_a_job_that_can_t_be_read_is_told(tmp_path: Path, kept: str) -> None:
    job = job_of(tmp_path)
    (job.work / FILE).write_text(kept)
    with pytest.raises(ConfigError, match=r"remove|begun with other"):
        job.continues()


def test_names_of_any_bytes_are_kept(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    named = replace(job, texts=(os.fsdecode(b"/texts/\xff"),), target=target_of(Path(job.model)))
    named.save()
    assert Job.load(job.work) == named


def test_a_process_that_lost_its_signal_gets_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ready, began = tmp_path / "ready", time.monotonic()
    deaf = f"""
import pathlib, signal, sys, time
heard = []
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3) if heard else heard.append(0))
pathlib.Path({str(ready)!r}).touch()
time.sleep(60)
"""
    monkeypatch.setattr(command, "AGAIN", 0.3)

    def interrupted(_: float) -> None:
        while not ready.exists():
            assert time.monotonic() - began < 30
        raise KeyboardInterrupt

    monkeypatch.setattr(command.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        RUN([([sys.executable, "-c", deaf], {})])
    assert time.monotonic() - began < 40


def test_torchrun_has_time_to_end_its_own_processes() -> None:
    """A second signal ends it, and processes that have not ended yet would go on."""
    assert 10 < LaunchConfig(1, 1, 1).shutdown_timeout < command.AGAIN
