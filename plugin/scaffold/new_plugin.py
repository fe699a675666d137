"""Writing a new plugin to a folder of its own."""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.values import reason_of, shown
from vllm_graft.scaffold.templates import KINDS, files

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def write(name: str, kind: str, parent: Path) -> Path:
    """Write a distribution whose tests pass, and return its folder.

    Args:
        name: of the distribution, and of its folder.
        kind: a key of `KINDS`.
        parent: the folder in which its folder is made.

    Raises:
        ConfigError: for a name that no distribution or module may have, and for a folder that
            exists already or can't be made.
    """
    _require_name(name)
    folder = parent / name
    if folder.exists():
        raise ConfigError(
            f"NAME {name!r}: {folder} exists already, and nothing in it is changed. Choose another "
            "name, or another folder by --into."
        )
    try:
        for path, text in files(KINDS[kind], name).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    except OSError as error:
        raise ConfigError(
            f"--into {shown(str(parent))}: {folder} can't be written: {reason_of(error)}. Give a "
            "folder that you may write to."
        ) from error
    return folder


def _require_name(name: str) -> None:
    module = name.replace("-", "_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(module):
        raise ConfigError(
            f"NAME {shown(name)} can't be the name of a distribution and of its module: write "
            "small letters, digits and single hyphens, a letter first, as graft-wide."
        )
    if importlib.util.find_spec(module) is not None:
        raise ConfigError(
            f"NAME {name!r}: a module {module} is installed already, and one of the two would hide "
            "the other. Choose another name."
        )
