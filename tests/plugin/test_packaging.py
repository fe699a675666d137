"""The content of the distribution, and the modules that importing it loads."""

import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.processes import finished

ROOT = Path(__file__).parents[2]
PARTS = ("plugin", "graph_runners", "spec_decode", "hicache")


def test_import_names_are_paths() -> None:
    assert (ROOT / "vllm_graft").resolve() == ROOT / "plugin"
    for part in PARTS[1:]:
        assert (ROOT / "vllm_graft" / part).resolve() == ROOT / part


def test_every_folder_is_a_package() -> None:
    folders = {file.parent for part in PARTS for file in (ROOT / part).rglob("*.py")}
    assert len(folders) > 40
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_a_checkout_works_without_an_install(tmp_path: Path) -> None:
    """A new file needs no new install: the path alone finds it."""
    code = "from vllm_graft.spec_decode.trees import tree; print(tree.__file__)"
    variables = {"PYTHONPATH": f"{ROOT}:{Path(pytest.__file__).parents[1]}"}
    told = finished(sys.executable, "-S", "-c", code, env=variables, cwd=tmp_path)
    assert Path(told.strip()) == ROOT / "vllm_graft/spec_decode/trees/tree.py"


def test_the_wheel_holds_every_module(tmp_path: Path) -> None:
    # A copy is built, because building leaves build/ and *.egg-info behind.
    source = tmp_path / "source"
    source.mkdir()
    unwanted = shutil.ignore_patterns("__pycache__")
    for part in PARTS:
        shutil.copytree(ROOT / part, source / part, symlinks=True, ignore=unwanted)
    (source / "vllm_graft").symlink_to("plugin")
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    flags = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", tmp_path)
    finished(sys.executable, "-m", "pip", "wheel", *flags, source)
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name.endswith("py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for part in PARTS:
        for module in (source / part).rglob("*.py"):
            inside = module.relative_to(source / "plugin" if part == "plugin" else source)
            assert f"vllm_graft/{inside}" in names
    assert "vllm_graft/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_importing_the_package_is_light(run_python: Callable[..., Any]) -> None:
    done = run_python(
        "import sys, vllm_graft, vllm_graft.hooks.manager, vllm_graft.seams.compare;"
        "import vllm_graft.cli, vllm_graft.api;"
        "vllm_graft.hookimpl, vllm_graft.GraftConfig, vllm_graft.GraftError;"
        "print([name for name in ('torch', 'vllm', 'triton', 'transformers', 'numpy')"
        " if name in sys.modules])"
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_unknown_attributes_stay_attribute_errors() -> None:
    import vllm_graft

    with pytest.raises(AttributeError, match="no attribute 'Worker'"):
        _ = vllm_graft.Worker


def test_module_command_runs() -> None:
    told = finished(sys.executable, "-P", "-m", "vllm_graft", "--version")
    assert told.startswith("vllm-graft 0.32.")


def test_the_workflow_runs_commands_that_there_are() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    named = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    named += jobs["nightly"]["strategy"]["matrix"]["command"]
    scripts = [ROOT / each.split()[0] for each in named if each.startswith(".ci/")]
    assert {".ci/run", ".ci/nightly", ".ci/newest", ".ci/package dist"} <= {*named}
    assert [script for script in scripts if not os.access(script, os.X_OK)] == []
