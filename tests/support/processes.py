"""Commands that run to their end, and installs without a network."""

import subprocess
import sys
from pathlib import Path
from typing import Any


def finished(*command: object, status: int = 0, timeout: float | None = 300, **options: Any) -> str:
    """Run a command, which ends with this status; return what it printed."""
    words = [*map(str, command)]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=timeout, check=False, **options
    )
    assert done.returncode == status, done.stdout[-4000:] + done.stderr[-4000:]
    text: str = done.stdout
    return text


def pip_install(target: Path, *sources: Path) -> Path:
    """Install distributions in a folder; return the folder."""
    flags = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", target)
    finished(sys.executable, "-m", "pip", "install", *flags, *sources)
    return target
