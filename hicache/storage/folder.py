"""A check whether a directory can be used. It does not create the directory."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from vllm_graft.base.errors import ConfigError
from vllm_graft.hicache.config.connector_options import option_flag


def require_folder(path: Path) -> None:
    """Refuse a directory that cannot be created or written to. It leaves nothing behind.

    Raises:
        ConfigError: says why the directory cannot be used.
    """
    if problem := _problem(path):
        raise ConfigError(
            f"{option_flag('storage', 'path')}: {str(path)!r} cannot be used: {problem}. Give a "
            "directory that the engine may write to."
        )


def _problem(path: Path) -> str | None:
    """What is wrong with the directory, or with its nearest existing parent; None if nothing."""
    for folder in (path, *path.parents):
        try:
            status = folder.stat()
        except (FileNotFoundError, NotADirectoryError):
            if folder.is_symlink():
                return f"{folder} is a link that leads nowhere"
            continue
        except OSError as error:
            return f"{folder}: {error.strerror}"
        if not stat.S_ISDIR(status.st_mode):
            return f"{folder} is no directory"
        if not os.access(folder, os.W_OK | os.X_OK):
            return f"{folder} may not be written to"
        return None if folder == path else _refuses_folders(folder)
    return None


def _refuses_folders(folder: Path) -> str | None:
    """Why no directory can be created in one that may be written to, as in ``/proc``; else None.

    It is tried only in file systems without blocks, which most such ones are, as a try changes the
    directory's time.
    """
    try:
        if os.statvfs(folder).f_blocks:
            return None
        with tempfile.TemporaryDirectory(prefix=".vllm-graft-", dir=folder):
            return None
    except OSError as error:
        return f"no directory can be created in {folder} ({error.strerror})"
