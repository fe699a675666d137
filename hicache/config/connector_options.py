"""The names of our connector, and validation of options below its extra config."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path, PurePath
from typing import Annotated

from pydantic import BeforeValidator

from vllm_graft.base.log import info_once
from vllm_graft.base.options import Section, SectionT, parse
from vllm_graft.base.values import below, shown

CONNECTOR = "HiCacheConnector"
MULTI_CONNECTOR = "MultiConnector"
MODULE = "vllm_graft.hicache.connector"
EXTRA = "kv_connector_extra_config"
FLAG = f"--kv-transfer-config.{EXTRA}"

_flag: ContextVar[str] = ContextVar("flag of the extra config", default=FLAG)


def _folder(value: object) -> object:
    if not isinstance(value, (str, PurePath)):
        return value
    if not str(value).strip() or "\0" in str(value):
        raise ValueError("name a directory")
    try:
        path = Path(value).expanduser()
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    if not path.is_absolute():
        path = path.absolute()
        info_once(f"the relative path {shown(str(value))} stands for {path}")
    return path


Folder = Annotated[Path, BeforeValidator(_folder)]
"""A directory. ``~`` is expanded, and relative paths begin at the working directory."""

Options = Section
"""Base class of options, with :data:`Bytes` for sizes and :data:`Folder` for directories.

Instances are frozen, and unknown keys are refused.
"""


def parse_options(model: type[SectionT], values: object, *path: str) -> SectionT:
    """Validate the options at ``path``, the keys that lead from the extra config to ``values``.

    Raises:
        ConfigError: has a line for each wrong key, with its full flag, its value, and what is
            allowed.
    """
    return parse(model, values, option_flag(*path))


def option_flag(*path: str | int) -> str:
    """The full flag of a key, as in ``option_flag("storage", "path")``."""
    return below(_flag.get(), *path)


@contextlib.contextmanager
def flags_below(flag: str) -> Iterator[None]:
    """Let :func:`option_flag` return flags of one of several connectors, below ``flag``."""
    token = _flag.set(flag)
    try:
        yield
    finally:
        _flag.reset(token)
