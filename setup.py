"""The page of the package's index: the README, with links that lead somewhere from there."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]

readme = (ROOT / "README.md").read_text()
readme = re.sub(r"(!\[[^]]*\])\(([^):]+)\)", rf"\1({SOURCE}/raw/main/\2)", readme)
setup(
    long_description=re.sub(r"\]\((?!https?://|#)([^)]+)\)", rf"]({SOURCE}/blob/main/\1)", readme),
    long_description_content_type="text/markdown",
)
