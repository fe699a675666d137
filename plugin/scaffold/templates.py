"""The files of a new plugin, from texts beside this one with ``$name`` and the like to fill in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from string import Template

_TEXTS = Path(__file__).parent


@dataclass(frozen=True)
class Kind:
    """A kind of plugin. Its own texts are those whose names begin with its name.

    Attributes:
        name: the command knows it by this name.
        hook: the hook that it implements.
        summary: what it adds, for the help.
        use: how a server is told to use it; ``$entry`` is the entry's name.
    """

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
"""Kinds of plugins by the names that the command knows them by; the first one is the default."""


def files(kind: Kind, name: str) -> dict[str, str]:
    """The files of a new distribution, by their paths within its folder.

    Args:
        kind: one of `KINDS`.
        name: of the distribution, as in ``pip install``.
    """
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
