"""The names of our connector, and validation of options below its extra config."""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path, PurePath
from typing import Annotated, Any

from pydantic import BeforeValidator

from vllm_graft.base.log import info_once
from vllm_graft.base.options import MAX_DEPTH, Section, SectionT, parse
from vllm_graft.base.values import below, shown

CONNECTOR = "HiCacheConnector"
MULTI_CONNECTOR = "MultiConnector"
MODULE = "vllm_graft.hicache.connector"
EXTRA = "kv_connector_extra_config"
_TRANSFER = "--kv-transfer-config"
FLAG = f"{_TRANSFER}.{EXTRA}"

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
"""Base class of options, with :data:`Bytes` for sizes and :data:`Folder` for directories. Instances
are frozen, and unknown keys are refused."""


def parse_options(model: type[SectionT], values: object, *path: str) -> SectionT:
    """Validate the options at ``path``, the keys that lead from the extra config to ``values``.
    Raises `ConfigError` with a line for each wrong key, with its full flag, its value, and what
    is allowed."""
    return parse(model, values, option_flag(*path))


def option_flag(*path: str | int) -> str:
    """The full flag of a key, as in ``option_flag("storage", "path")``."""
    return below(_flag.get(), *path)


def is_ours(transfer: Mapping[Any, Any]) -> bool:
    """Whether a connector's configuration names our connector."""
    module = transfer.get("kv_connector_module_path")
    return transfer.get("kv_connector") == CONNECTOR and module in (None, MODULE)


def all_connectors(
    transfer: Any, path: str = _TRANSFER, depth: int = MAX_DEPTH
) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Yield each connector's configuration and its flag: the given one, and those below it. A
    ``MultiConnector`` has others below it. ``transfer`` is vLLM's ``KVTransferConfig``, or a
    mapping of the same keys; of anything else nothing is yielded."""
    given = transfer if isinstance(transfer, Mapping) else getattr(transfer, "__dict__", None)
    if given is None:
        return
    yield path, given
    extra, module = given.get(EXTRA), given.get("kv_connector_module_path")
    if given.get("kv_connector") != MULTI_CONNECTOR or module is not None or not depth:
        return
    children = extra.get("connectors") if isinstance(extra, Mapping) else None
    for index, child in enumerate(children if isinstance(children, (list, tuple)) else ()):
        if isinstance(child, Mapping):
            yield from all_connectors(child, below(path, EXTRA, "connectors", index), depth - 1)


@contextlib.contextmanager
def flags_below(flag: str) -> Iterator[None]:
    """Let :func:`option_flag` return flags of one of several connectors, below ``flag``."""
    token = _flag.set(flag)
    try:
        yield
    finally:
        _flag.reset(token)
