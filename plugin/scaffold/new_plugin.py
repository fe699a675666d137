"""Writing a new plugin, from texts beside this file with ``$name`` and the like to fill in."""

import importlib.util
import keyword
import re
from dataclasses import dataclass
from pathlib import Path
from string import Template

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.values import reason_of, shown

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_TEXTS = Path(__file__).parent


@dataclass(frozen=True)
class Kind:
    """A kind of plugin. Its own texts are those whose names begin with its name. ``use`` tells a
    server to use it; ``$entry`` is the entry's name."""

    name: str
    hook: str
    summary: str
    use: str


_TREE_POLICY = Kind(
    "tree-policy",
    hook="graft_tree_policies",
    summary="the shape of draft trees",
    use="vllm serve ... --additional-config.graft.tree.policy $entry",
)
_EVICTION_POLICY = Kind(
    "eviction-policy",
    hook="graft_eviction_policies",
    summary="which page leaves the host KV cache first",
    use="""vllm serve ... --kv-transfer-config '{"kv_connector": "HiCacheConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"host_bytes": "16GiB", "eviction": "$entry"}}'""",
)

KINDS = {kind.name: kind for kind in (_TREE_POLICY, _EVICTION_POLICY)}
"""By the names that the command knows; the first one is the default."""


def write(name: str, kind: str, parent: Path) -> Path:
    """Write a distribution whose tests pass into a folder of its name; return the folder. ``kind``
    is a key of `KINDS`. Raises `ConfigError` for a name that no distribution or module may have,
    and for a folder that exists already or can't be made."""
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


def files(kind: Kind, name: str) -> dict[str, str]:
    """The files of a new distribution, by their paths within its folder."""
    module = name.replace("-", "_")
    words = {"name": name, "module": module, "entry": name, "hook": kind.hook}
    words |= {"summary": kind.summary, "use": Template(kind.use).substitute(words)}
    texts = {
        "pyproject.toml": "pyproject",
        "README.md": "readme",
        f"{module}/__init__.py": f"{kind.name}.hooks",
        f"{module}/code.py": f"{kind.name}.code",
        "tests/test_plugin.py": f"{kind.name}.tests",
    }
    return {
        path: Template((_TEXTS / f"{text}.txt").read_text()).substitute(words)
        for path, text in texts.items()
    }
