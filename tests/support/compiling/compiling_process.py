"""Processes that compile kernels, where this one interprets them."""

import subprocess
import sys

from vllm_graft.spec_decode.startup.ahead import compiling_environment


def printed_by(*arguments: str) -> str:
    """What a process of this Python prints, given its arguments."""
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        env=compiling_environment(),
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    ).stdout
