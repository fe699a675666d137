"""What would be uploaded to a package index, and a session of somebody who installs it."""

import email
import json
import os
import re
import shlex
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.plugin.metrics.served_load import ask
from tests.support.engines.pair_server import server_settings, speculate
from tests.support.engines.shipped_pair import SHIPPED
from tests.support.engines.vllm_server import VllmServer
from tests.support.processes import finished
from vllm_graft.metrics.server_info import total

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
PARTS = ("plugin", "graph_runners", "spec_decode", "hicache")

HARNESS = ("PYTHONPATH", "TRITON_", "VLLM_")


def package(folder: Path) -> Path:
    """Build what would be uploaded; `twine check --strict` is part of it."""
    variables = {"PYTHON": sys.executable, "SOURCE_DATE_EPOCH": "1700000000"}
    finished(ROOT / ".ci" / "package", folder, env={**os.environ, **variables})
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    [found] = built.glob("*.whl")
    return found


@pytest.mark.nightly
def test_two_builds_have_the_same_bytes(built: Path, tmp_path: Path) -> None:
    again = package(tmp_path)
    names = sorted(file.name for file in built.iterdir())
    assert names == sorted(file.name for file in again.iterdir())
    assert len(names) == 3
    for name in names:
        assert (built / name).read_bytes() == (again / name).read_bytes(), name


def test_the_page_of_the_index_leads_somewhere(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        [name] = [each for each in opened.namelist() if each.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(opened.read(name))
    page = metadata.get_payload()
    assert isinstance(page, str)
    assert metadata["Description-Content-Type"] == "text/markdown"
    targets = re.findall(r"\]\(([^)]+)\)", page)
    assert len(targets) > 20
    assert [each for each in targets if not each.startswith(("https://", "#"))] == []
    urls = dict(each.split(", ", 1) for each in metadata.get_all("Project-URL", []))
    assert urls.keys() == {"Source", "Documentation", "Issues", "Changelog"}
    ours = [each for each in targets if each.startswith(urls["Source"])]
    for target in ours:
        kind, _, file = target.removeprefix(f"{urls['Source']}/").partition("/main/")
        assert (ROOT / file.partition("#")[0]).exists(), target
        assert kind == ("raw" if file.endswith(".svg") else "blob")
    assert any(each.startswith("Typing ::") for each in metadata.get_all("Classifier", []))


def test_the_wheel_has_no_tests_and_no_benchmarks_of_the_checkout(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    folders = {name.split("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == {"vllm_graft"}
    assert len(folders) == 2
    assert [name for name in names if re.search(r"(^|/)(test_|conftest|lab/)", name)] == []
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)
    texts = [file.name for file in (ROOT / "plugin/scaffold").glob("*.txt")]
    assert len(texts) == 8
    assert {f"vllm_graft/scaffold/{name}" for name in texts} <= {*names}


def test_the_sdist_has_every_module(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    modules = {
        f"vllm_graft/{file.relative_to(ROOT / 'plugin' if part == 'plugin' else ROOT)}"
        for part in PARTS
        for file in (ROOT / part).rglob("*.py")
    }
    assert modules <= names
    assert "vllm_graft/scaffold/readme.txt" in names
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= names


def test_the_bill_of_materials_lists_what_runs(built: Path) -> None:
    bill = json.loads((built / "sbom.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["name"] == "vllm-graft"
    listed = {component["name"]: component["version"] for component in bill["components"]}
    needed = [Requirement(text) for text in requires("vllm-graft") or ()]
    direct = {each.name for each in needed if each.marker is None}
    assert direct
    assert direct <= set(listed)
    assert all(re.match(r"\d", version) for version in listed.values())
    assert "vllm" not in listed


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """Install the wheel beside the vLLM of this environment, in an environment of its own."""
    home = tmp_path_factory.mktemp("user") / "venv"
    venv.create(home, with_pip=False)
    made = home / "bin" / "python"
    [own] = (home / "lib").glob("python*/site-packages")
    # A path, and not the files of links in it: vllm-graft's editable install stays out of sight.
    (own / "beside.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    pip = (sys.executable, "-m", "pip", "--python", made, "install", "--quiet")
    # A checkout on the path has metadata, by which pip would take it for installed.
    own_path = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    finished(*pip, "--no-deps", "--no-index", wheel, env=own_path)
    run(made, "-m", "vllm_graft.testing.environment")
    return made


def run(python: Path, *arguments: str, status: int = 0) -> str:
    variables = {"VLLM_GRAFT_INTERPRET": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    # What the harness has set for engines in its own process is not a user's.
    own = {name: text for name, text in os.environ.items() if not name.startswith(HARNESS)}
    return finished(python, "-P", *arguments, status=status, env={**own, **variables})


def test_an_installed_wheel_is_found_and_fits(python: Path) -> None:
    where = run(python, "-c", "import vllm_graft; print(vllm_graft.__file__)").strip()
    assert where.startswith(str(python.parents[1]))
    assert "no problem found" in run(python, "-m", "vllm_graft", "doctor")


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Some of the pair's prompts, as a dataset of lines."""
    texts = json.loads((SHIPPED / "prompts.json").read_text())
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"prompt": text[:80]}) + "\n" for text in texts[:4]))
    return file


def bench(python: Path, questions: Path, *flags: str) -> tuple[list[dict[str, Any]], str]:
    """Rows and the last line of a short ``vllm-graft bench trees``."""
    file = questions.with_name("rows.json")
    load = ["--requests-in-flight", "1", "--requests", "3", "--rounds", "1", "--tokens", "4"]
    given = (*flags, "--dataset", str(questions), *load, "--output", str(file))
    said = run(python, "-m", "vllm_graft", "bench", "trees", *given)
    return json.loads(file.read_text()), said.splitlines()[-1]


@pytest.mark.engine
def test_a_session_of_a_new_user(python: Path, questions: Path, tmp_path: Path) -> None:
    """From the wheel to a measured server, behind ``doctor`` above; no step needs a page."""
    flags, environment = server_settings(SHIPPED, cuda=False)
    flags += [*speculate(SHIPPED, 5), "--additional-config.graft", "auto"]
    plan = json.loads(run(python, "-m", "vllm_graft", "plan", *flags, "--json").splitlines()[-1])
    planned = {part["name"] for part in plan["parts"] if part["state"] == "on"}
    assert planned == {"tree"}
    # It is served as planned.
    assert shlex.split(plan["command"]) == ["vllm", "serve", *flags]

    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    command = (str(python), "-P", "-m", "vllm.entrypoints.cli.main")
    with VllmServer(flags, tmp_path / "log", environment, command, report=lambda _: None) as server:
        server.wait_ready()
        answer = ask(server, {"prompt": "def main", "max_tokens": 8, "ignore_eos": False})
        assert answer["usage"]["completion_tokens"] == 8
        talk = run(python, str(EXAMPLES / "client.py"), "--url", server.address).splitlines()
        told = run(python, "-m", "vllm_graft", "info", "--url", server.address, "--json")
        [row], last = bench(python, questions, "--url", server.address)
        metrics = server.metrics()
    # The engine's process is spawned: it begins without any of our modules.
    assert "vllm-graft measured steps of" in (tmp_path / "log").read_text()
    assert total(metrics, "vllm:spec_decode_num_drafts_total") > 0
    assert total(metrics, "vllm:graft_tree_trees_total") > 0
    # The example's client: the same text at once and in a stream, and one of two answers.
    heads = ["at once", "streamed", "one of two", "tokens per step"]
    assert [line.partition(":")[0] for line in talk] == heads
    whole, streamed = (line.partition(":")[2].strip() for line in talk[:2])
    assert streamed.startswith(whole)
    assert talk[2].partition(":")[2].strip() in ("'quick'", "'slow'")
    assert float(talk[3].partition(":")[2]) > 1
    info = json.loads(told)
    assert info["ok"]
    assert info["answers"]["tokens_per_step"] > 1
    # A bench of the server, which says what would compare it.
    assert row["arm"] == "server"
    assert row["tokens_per_second"] > 0
    assert row["acceptance_length"] > 1
    assert "without --url, stock is compared" in last


@pytest.mark.nightly
@pytest.mark.engine
def test_a_new_user_compares_arms(python: Path, questions: Path) -> None:
    flags, _ = server_settings(SHIPPED, cuda=False)
    flags += [*speculate(SHIPPED, 5), "--kv-cache-memory-bytes", str(2**26)]
    rows, last = bench(python, questions, *flags, "--arms", "none", "chain:2,3", "graft")
    lengths = {row["arm"]: row["acceptance_length"] for row in rows}
    assert list(lengths) == ["none", "chain:2", "chain:3", "graft"]
    assert lengths["none"] == 1 < lengths["chain:2"]
    assert lengths["graft"] > 1
    # A tree is interpreted here: stock is faster, and that is what is said.
    commands = {row["arm"]: row["command"] for row in rows}
    assert commands["graft"].endswith("--additional-config.graft auto")
    assert last.startswith("use this command: vllm serve")
    assert "ours, graft, is no faster" in last
    assert commands["graft"] not in last
