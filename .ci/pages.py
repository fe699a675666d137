"""Write what the code prints into the pages of `docs`: ``.venv/bin/python .ci/pages.py``."""

import contextlib
import io
import subprocess
import sys
from pathlib import Path

from vllm_graft.cli import main

DOCS = Path(__file__).resolve().parents[1] / "docs"
PRINTED = {"support": "support.md", "metrics": "metrics.md"}
"""The page that holds what a command prints, between the markers of its name."""

for command, name in PRINTED.items():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main([command])
    page = DOCS / name
    before, begin, rest = page.read_text().partition(f"<!-- {command}:begin -->\n")
    _, end, after = rest.partition(f"<!-- {command}:end -->")
    if not begin or not end:
        sys.exit(f"{page} has no markers for {command}")
    page.write_text(before + begin + printed.getvalue() + end + after)

for script in ("results", "figures", "rooms"):
    file = DOCS / "site" / f"{script}.py"
    subprocess.run([sys.executable, str(file)], check=True)
