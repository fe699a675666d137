"""`vllm-graft new-plugin` writes distributions whose tests pass, and that are found."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import pip_install
from vllm_graft.cli import main
from vllm_graft.scaffold.new_plugin import KINDS, write

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def its_tests(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(folder), str(folder / "tests")]
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTEST_ADDOPTS": ""}
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120
    )


FIRST, *OTHERS = KINDS


@pytest.mark.parametrize(
    "kind", [FIRST, *(pytest.param(kind, marks=pytest.mark.nightly) for kind in OTHERS)]
)
def test_a_new_plugin_is_found_and_its_tests_pass(
    kind: str, tmp_path: Path, run_python: RunPython, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new-plugin", "graft-brand-new", "--kind", kind, "--into", str(tmp_path)]) == 0
    folder = tmp_path / "graft-brand-new"
    told = capsys.readouterr().out
    assert str(folder / "graft_brand_new" / "code.py") in told
    assert f"cd {folder} && pip install" in told

    site = pip_install(tmp_path / "site", folder)
    done = its_tests(folder, site)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout

    code = "from vllm_graft.cli import main; raise SystemExit(main(['hooks', '--json']))"
    rows = json.loads(run_python(code, PYTHONPATH=str(site)).stdout)[KINDS[kind].hook]
    assert (rows[0]["name"], rows[0]["provider"]) == ("graft-brand-new", "graft-brand-new 0.1.0")


def test_it_imports_from_the_public_modules_alone(kind: str, tmp_path: Path) -> None:
    modules = [*write("graft-brand-new", kind, tmp_path).rglob("*.py")]
    assert len(modules) == 3
    for module in modules:
        imported = re.findall(r"^(?:from|import) (vllm_graft[\w.]*)", module.read_text(), re.M)
        assert {*imported} <= {"vllm_graft.api", "vllm_graft.testing"}, module


def test_its_tests_notice_a_policy_that_breaks_the_contract(tmp_path: Path) -> None:
    folder = write("graft-brand-new", "tree-policy", tmp_path)
    file = folder / "graft_brand_new" / "code.py"
    file.write_text(file.read_text().replace("steps, num_nodes)", "steps, num_nodes + 1)"))
    done = its_tests(folder, folder)
    assert done.returncode == 1
    assert "test_shape_is_within_its_bounds" in done.stdout


@pytest.mark.parametrize("name", ["Graft", "1st", "a_b", "a--b", "-a", "a b", "../a", "class", ""])
def test_names_that_nothing_may_have(name: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="can't be the name of a distribution"):
        main(["new-plugin", "--into", str(tmp_path), "--", name])
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", ["vllm-graft", "pytest", "json"])
def test_names_of_modules_that_are_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is installed already"):
        main(["new-plugin", name, "--into", str(tmp_path)])


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "graft-old").mkdir()
    with pytest.raises(SystemExit, match="exists already"):
        main(["new-plugin", "graft-old", "--into", str(tmp_path)])
    assert [*(tmp_path / "graft-old").iterdir()] == []


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="can't be written: NotADirectoryError"):
        main(["new-plugin", "graft-x", "--into", str(tmp_path / "file")])
