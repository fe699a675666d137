"""The examples of `docs/examples` run, and their files are what their readers want."""

import argparse
import json
import os
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import MagicMock

import pytest
import yaml
from compose_spec import PyCompose

from tests.support.engines.cache_engines import transfer
from tests.support.engines.pair_server import server_settings
from tests.support.engines.shipped_pair import SHIPPED
from tests.support.models.table_drafter import learned
from tests.support.processes import finished, pip_install
from vllm_graft.base.decision import PRESETS
from vllm_graft.hicache.config.cache_config import HiCacheConfig
from vllm_graft.hicache.config.connector_options import parse_options
from vllm_graft.hicache.storage.segments.store import SegmentsOptions
from vllm_graft.scaffold.new_plugin import write
from vllm_graft.testing import cpu_engine, greedy

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PLUGINS = sorted(each.parent for each in EXAMPLES.glob("plugins/*/pyproject.toml"))
KUBERNETES = "1.31"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plugins installed, without a network."""
    target, source = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("source")
    copies = [write("graft-narrow", "tree-policy", source)]
    for plugin in PLUGINS:
        # Copies are built, because building writes beside the source.
        copies.append(source / plugin.name)
        shutil.copytree(plugin, copies[-1], ignore=shutil.ignore_patterns("__pycache__"))
    return pip_install(target, *copies)


def run(*arguments: object, **variables: str) -> str:
    """Run a Python program as a user on a CPU does; return what it printed."""
    _, environment = server_settings(SHIPPED, cuda=False)
    environment |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", **variables}
    variables = {**os.environ, **environment}
    return finished(sys.executable, "-P", *arguments, env=variables, timeout=570)


def test_the_plugins_tests_pass(site: Path) -> None:
    folders = [plugin / "tests" for plugin in PLUGINS]
    told = run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"),
        *("--rootdir", EXAMPLES / "plugins", *folders),
        PYTHONPATH=str(site),
    )
    assert re.search(r"\b[1-9]\d+ passed", told)
    assert "skipped" not in told


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_plugins_import_from_the_public_modules_alone(plugin: Path) -> None:
    modules = [*plugin.rglob("*.py")]
    assert len(modules) == 3
    for module in modules:
        imported = re.findall(r"^(?:from|import) (vllm_graft[\w.]*)", module.read_text(), re.M)
        assert {*imported} <= {"vllm_graft.api", "vllm_graft.testing"}, module


def of_page(program: Path) -> list[str]:
    """The arguments in the command that a program's docstring shows."""
    shown = re.search(rf"^    python {program.name} (.*)$", program.read_text(), re.MULTILINE)
    assert shown is not None, program
    return shlex.split(shown[1])


class Read(Exception):
    """A program's arguments were read."""


@pytest.mark.parametrize("program", sorted(EXAMPLES.glob("*.py")), ids=lambda each: each.name)
def test_each_program_takes_the_command_of_its_page(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = argparse.ArgumentParser.parse_args

    def parse_args(parser: argparse.ArgumentParser) -> NoReturn:
        original(parser)
        raise Read

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(sys, "argv", [program.name, *of_page(program)])
    monkeypatch.setitem(sys.modules, "vllm", MagicMock())
    with pytest.raises(Read):
        runpy.run_path(str(program), run_name="__main__")


@pytest.mark.nightly
@pytest.mark.engine
def test_offline_as_its_page_says() -> None:
    """A preset decides where no options are given."""
    printed = run(EXAMPLES / "offline.py", SHIPPED / "target", SHIPPED / "eagle3")
    told = json.loads(printed.splitlines()[-1])
    assert [len(tokens) for tokens in told["tokens"]] == [32] * 3
    assert told["parts"] == ["tree"]
    assert told["tokens per step"] > 1.5


@pytest.mark.engine
def test_offline_with_the_three_plugins(site: Path, tmp_path: Path) -> None:
    prompts = re.findall(r'^    "(.*)",$', (EXAMPLES / "offline.py").read_text(), re.MULTILINE)
    assert len(prompts) == 3
    with cpu_engine(SHIPPED / "target", max_model_len=256) as llm:
        expected = greedy(llm, prompts, 12)
        asked = [llm.get_tokenizer().encode(prompt) for prompt in prompts]
    table = tmp_path / "table.json"
    answered = [[*prompt, *answer] for prompt, answer in zip(asked, expected)]
    table.write_text(json.dumps(learned(answered)))

    storage = {"backend": "sqlite", "path": str(tmp_path / "pages"), "max_bytes": 8_000_000}
    engine = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4}
    engine |= {"block_size": 32, "kv_transfer_config": transfer(host_bytes="8MiB", storage=storage)}
    graft = {"tree": {"policy": "graft-narrow", "drafter": "bigram", "topk": 4, "nodes": 7}}
    printed = run(
        *(EXAMPLES / "offline.py", SHIPPED / "target", SHIPPED / "eagle3", "--max-tokens", "12"),
        *("--engine", json.dumps(engine), "--graft", json.dumps(graft)),
        PYTHONPATH=str(site),
        GRAFT_BIGRAM_TABLE=str(table),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    told = json.loads(printed.splitlines()[-1])
    assert told["prompts"] == asked
    assert told["tokens"] == expected
    assert told["parts"] == ["hicache", "tree"]
    # The table has been made of the answers: its drafts are accepted, where an empty one has 1.0.
    assert told["tokens per step"] > 2
    [database] = (tmp_path / "pages").iterdir()
    assert database.suffix == ".sqlite"


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(590)
def test_a_restarted_server_starts_warm(tmp_path: Path) -> None:
    flags = ["--max-model-len", "512", "--max-num-seqs", "4", "--dtype", "float32"]
    flags += ["--enforce-eager", "--block-size", "32", "--num-gpu-blocks-override", "40"]
    # Storage is read whatever was measured of it, which varies too much on a busy CPU.
    printed = run(
        *(EXAMPLES / "warm_restart.py", SHIPPED / "target", "--store", tmp_path),
        *("--host-bytes", "8MiB", "--max-bytes", "16MiB"),
        *("--flags", json.dumps(flags)),
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_GRAFT_PREFILL_RATE="10",
    )
    told = json.loads(printed.splitlines()[-1])
    assert told["same answer"] is True
    assert told["of which the second server read from the store"] >= 64
    assert told["prompt tokens"] > told["of which the second server read from the store"]


def compose_problem(text: str) -> str:
    """What is wrong with a compose file; empty if nothing is."""
    try:
        PyCompose.from_yaml(text).to_spec()
    except ValueError as error:
        return str(error)
    read = yaml.safe_load(text)
    mounted = {
        str(volume).partition(":")[0]
        for service in read["services"].values()
        for volume in service.get("volumes", [])
    }
    named = {volume for volume in mounted if not volume.startswith(("/", "."))}
    files = [volume for volume in mounted if volume.startswith(".")]
    missing = [file for file in files if not (EXAMPLES / file).exists()]
    unknown = named ^ read["volumes"].keys()
    return f"volumes {missing} {unknown}" if missing or unknown else ""


def test_the_compose_file_is_one() -> None:
    text = (EXAMPLES / "compose.yaml").read_text()
    assert compose_problem(text) == ""
    for right, wrong in (
        ("healthcheck:", "healthchek:"),
        ("shm_size: 40gb", "shm_size: [40]"),
        ("- pages:/var", "- page:/var"),
        ("./prometheus.yaml", "./prometeus.yaml"),
    ):
        assert right in text
        assert compose_problem(text.replace(right, wrong)) != "", wrong


@pytest.mark.nightly
def test_the_manifest_is_one() -> None:
    # It takes seconds to import, which each process would spend that collects this file.
    import kubernetes_validate

    documents = [*yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())]
    assert [document["kind"] for document in documents] == ["Deployment", "Service"]
    for document in documents:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    deployment, service = documents
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    pod = deployment["spec"]["template"]["spec"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == volumes
    pod["containers"][0]["portz"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="portz"):
        kubernetes_validate.validate(deployment, KUBERNETES, strict=True)


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the flags of `vllm serve` in the files."""
    compose = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())
    yield "compose", compose["services"]["vllm"]["command"]
    deployment, _ = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    yield "kubernetes", deployment["spec"]["template"]["spec"]["containers"][0]["args"]


@pytest.mark.parametrize(("name", "command"), commands())
def test_their_flags_are_right(name: str, command: list[str]) -> None:
    _, *rest = command
    given: dict[str, Any] = dict(zip(rest[::2], rest[1::2], strict=True))
    assert given["--additional-config.graft"] in PRESETS
    speculative = json.loads(given["--speculative-config"])
    assert speculative["method"] == "eagle3"
    assert speculative["num_speculative_tokens"] > 1
    transfer = json.loads(given["--kv-transfer-config"])
    assert transfer["kv_connector"] == "HiCacheConnector"
    extra = parse_options(HiCacheConfig, transfer["kv_connector_extra_config"])
    assert extra.storage is not None
    storage = {**extra.storage}
    assert storage.pop("backend") == "segments"
    assert parse_options(SegmentsOptions, storage, "storage").max_bytes > extra.host_bytes


def test_the_script_of_the_server_is_one() -> None:
    script = EXAMPLES / "serve.sh"
    assert os.access(script, os.X_OK)
    shown = "vllm() { :; }; exec() { printf '%s\\n' \"$@\"; }; "
    script_of = f"{shown} . {shlex.quote(str(script))} TARGET DRAFT --port 1"
    told = finished("bash", "-c", script_of, timeout=30).splitlines()
    assert told[:4] == ["vllm", "serve", "TARGET", "--speculative-config"]
    assert json.loads(told[4])["model"] == "DRAFT"
    assert told[5:] == ["--additional-config.graft", "auto", "--port", "1"]
