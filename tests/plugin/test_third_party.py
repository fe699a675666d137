"""Third-party distributions, really installed with pip, beside a broken one."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import pip_install

SAMPLE = Path(__file__).parents[1] / "sample_plugin"
RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

CHOOSE = """
import logging; logging.basicConfig(level=logging.INFO)
from vllm_graft.hooks.manager import manager, resolve
print(manager().choose("graft_tree_policies", "dynamic", "--flag").entry.load)
"""
RESOLVE = """
print(resolve("graft_tree_policies", "dynamic", "tree", "policy").__name__)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sample distribution installed."""
    source = tmp_path_factory.mktemp("source") / "sample"
    # A copy is built, because building writes beside the source.
    source.mkdir()
    for file in ("pyproject.toml", "graft_sample.py"):
        (source / file).write_bytes((SAMPLE / file).read_bytes())
    return pip_install(tmp_path_factory.mktemp("site"), source)


@pytest.fixture
def broken_site(tmp_path: Path) -> Path:
    """A folder with an installed distribution that fails when it is imported."""
    (tmp_path / "graft_broken.py").write_text("raise RuntimeError('out of paper')\n")
    info = tmp_path / "graft_broken-0.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: graft-broken\nVersion: 0.9\n")
    (info / "entry_points.txt").write_text("[vllm_graft]\nbroken = graft_broken\n")
    return tmp_path


def test_without_it_ours_is_chosen(run_python: RunPython) -> None:
    done = run_python(CHOOSE)
    assert "vllm_graft.spec_decode.tuning.shapes:dynamic" in done.stdout, done.stderr


def test_an_installed_policy_replaces_ours(run_python: RunPython, site: Path) -> None:
    done = run_python(CHOOSE + RESOLVE, PYTHONPATH=str(site))
    assert done.stdout.split() == ["graft_sample:FirstNodesPolicy", "FirstNodesPolicy"]
    assert "graft-sample 1.2.3 replaces vllm-graft's own entry" in done.stderr


def test_a_broken_one_beside_it_is_named(
    run_python: RunPython, site: Path, broken_site: Path
) -> None:
    done = run_python(CHOOSE + RESOLVE, PYTHONPATH=os.pathsep.join([str(broken_site), str(site)]))
    assert "FirstNodesPolicy" in done.stdout
    assert done.stderr.count("is set aside") == 1
    assert "graft-broken 0.9 (broken) is set aside: RuntimeError: out of paper" in done.stderr


def test_one_that_exits_ends_no_process(run_python: RunPython, broken_site: Path) -> None:
    (broken_site / "graft_broken.py").write_text("import sys\nsys.exit(3)\n")
    code = """
from types import ModuleType, SimpleNamespace
from vllm_graft.hicache.cache_part import register_connectors
module = ModuleType("factory")
names = []
factory = SimpleNamespace(_registry={}, register_connector=lambda *given: names.append(given[0]))
module.KVConnectorFactory = factory
register_connectors(module)
print("alive", names)
"""
    done = run_python(code, PYTHONPATH=str(broken_site))
    assert (done.returncode, done.stdout) == (0, "alive ['HiCacheConnector']\n"), done.stderr
    assert "graft-broken 0.9 (broken) is set aside: SystemExit: 3" in done.stderr


def test_hooks_command_says_who_provides(run_python: RunPython, site: Path) -> None:
    code = "from vllm_graft.cli import main; raise SystemExit(main(['hooks', '--json']))"
    done = run_python(code, PYTHONPATH=str(site))
    rows = json.loads(done.stdout)["graft_tree_policies"]
    found = [f"{row['name']} {row['provider'].split()[0]}" for row in rows]
    assert found == ["dynamic graft-sample", "dynamic vllm-graft", "whole vllm-graft"]


def test_doctor_lists_it_and_runs_its_check(
    run_python: RunPython, site: Path, broken_site: Path
) -> None:
    code = """
from vllm_graft import doctor
from vllm_graft.hooks.manager import manager
for finding in [*doctor._plugins(manager()), *doctor._health(manager())]:
    print(finding.ok, finding.check, finding.detail)
"""
    done = run_python(code, PYTHONPATH=os.pathsep.join([str(broken_site), str(site)]))
    assert "True plugin graft-sample 1.2.3 (sample)" in done.stdout, done.stderr
    assert "True sample (graft-sample) policy is ready" in done.stdout
    assert "False plugin graft-broken 0.9 (broken) is set aside" in done.stdout
