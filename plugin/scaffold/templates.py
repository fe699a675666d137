"""The files of a new plugin, as texts with ``$name``, ``$module`` and ``$entry`` to fill in."""

from __future__ import annotations

from dataclasses import dataclass
from string import Template


@dataclass(frozen=True)
class Kind:
    """A kind of plugin.

    Attributes:
        hook: the hook that it implements.
        summary: what it adds, for the help.
        use: how a server is told to use it; ``$entry`` is the entry's name.
        hooks: the package's own module, which vLLM's frontend imports too.
        code: the module with the object of the entry.
        tests: its tests.
    """

    hook: str
    summary: str
    use: str
    hooks: str
    code: str
    tests: str


_TREE_POLICY = Kind(
    hook="graft_tree_policies",
    summary="the shape of draft trees",
    use="vllm serve ... --additional-config.graft.tree.policy $entry",
    hooks='''"""$name: a tree policy for vllm-graft.

Keep this module free of torch and vLLM: it is imported in vLLM's frontend as well.
"""

from vllm_graft.api import entries, hookimpl


@hookimpl
def graft_tree_policies() -> list[entries.TreePolicy]:
    """Offer the policy, by the name that `graft.tree.policy` chooses it by."""
    load = "$module.code:narrow"
    return [entries.TreePolicy("$entry", load, "the narrowest tree that holds the nodes")]
''',
    code='''"""The policy itself, which is imported only when it was chosen."""

from vllm_graft.api import TreeConfig, TreeShape


def narrow(config: TreeConfig, num_nodes: int) -> TreeShape:
    """Return the narrowest tree with the configured steps that holds so many nodes.

    It is asked once for each number of nodes while the engine is built, in each process, and has to
    answer the same everywhere.
    """
    steps = min(config.steps, num_nodes)
    for topk in range(1, config.topk):
        shape = TreeShape(topk, steps, num_nodes)
        if shape.num_candidates >= num_nodes:
            return shape
    return TreeShape(config.topk, steps, num_nodes)
''',
    tests='''"""Tests of the policy: those of every tree policy, and its own."""

from importlib.metadata import entry_points

import pytest
from vllm_graft.api import TreeConfig
from vllm_graft.testing import TreePolicyContract

import $module
from $module.code import narrow


class TestNarrow(TreePolicyContract):
    @pytest.fixture
    def policy(self):
        return narrow


def test_it_is_no_wider_than_it_has_to_be():
    assert narrow(TreeConfig(topk=8, steps=4), 4).topk == 1
    assert narrow(TreeConfig(topk=8, steps=4), 14).topk == 2
    assert narrow(TreeConfig(topk=8, steps=4), 63).topk == 5


def test_the_entry_leads_to_it():
    [entry] = $module.graft_tree_policies()
    assert entry.resolve() is narrow


def test_vllm_graft_finds_the_plugin():
    [point] = entry_points(group="vllm_graft", name="$module")
    assert point.load() is $module
''',
)

_EVICTION_POLICY = Kind(
    hook="graft_eviction_policies",
    summary="which page leaves the host KV cache first",
    use="""vllm serve ... --kv-transfer-config '{"kv_connector": "HiCacheConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"host_bytes": "16GiB", "eviction": "$entry"}}'""",
    hooks='''"""$name: an eviction policy for vllm-graft's host KV cache.

Keep this module free of torch and vLLM: it is imported in vLLM's frontend as well.
"""

from vllm_graft.api import entries, hookimpl


@hookimpl
def graft_eviction_policies() -> list[entries.EvictionPolicy]:
    """Offer the policy, by the name that `eviction` chooses it by."""
    load = "$module.code:FirstInFirstOut"
    return [entries.EvictionPolicy("$entry", load, "the page that came first leaves first")]
''',
    code='''"""The policy itself, which is imported only when it was chosen."""

from collections.abc import Callable, Hashable
from itertools import islice

from vllm_graft.api import EvictionPolicy


class FirstInFirstOut(EvictionPolicy):
    """Evicts pages in the order in which they came, whether or not they were used."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._pages: dict[Hashable, None] = {}

    def insert(self, key: Hashable, cost: float, size: int) -> None:
        """Add a page behind the others; one that is here already keeps its place."""
        self._pages.setdefault(key)

    def touch(self, key: Hashable) -> None:
        """A use changes nothing."""

    def remove(self, key: Hashable) -> None:
        """Forget a page."""
        self._pages.pop(key, None)

    def evict(self, n: int, is_protected: Callable[[Hashable], bool]) -> list[Hashable] | None:
        """Remove the first `n` pages that are not protected; all or none."""
        found = list(islice((key for key in self._pages if not is_protected(key)), n))
        if len(found) < n:
            return None
        for key in found:
            del self._pages[key]
        return found

    def clear(self) -> None:
        """Forget all pages."""
        self._pages.clear()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: object) -> bool:
        return key in self._pages
''',
    tests='''"""Tests of the policy: those of every eviction policy, and its own."""

from importlib.metadata import entry_points

import pytest
from vllm_graft.testing import EvictionPolicyContract

import $module
from $module.code import FirstInFirstOut


class TestFirstInFirstOut(EvictionPolicyContract):
    @pytest.fixture
    def policy(self):
        return FirstInFirstOut(capacity=8)


def test_a_use_does_not_count():
    policy = FirstInFirstOut(capacity=2)
    for key in ("a", "b"):
        policy.insert(key, 1.0, 1)
    policy.touch("a")
    assert policy.evict(1, lambda key: False) == ["a"]


def test_the_entry_leads_to_it():
    [entry] = $module.graft_eviction_policies()
    assert entry.resolve() is FirstInFirstOut


def test_vllm_graft_finds_the_plugin():
    [point] = entry_points(group="vllm_graft", name="$module")
    assert point.load() is $module
''',
)

KINDS = {"tree-policy": _TREE_POLICY, "eviction-policy": _EVICTION_POLICY}
"""Kinds of plugins by the names that the command knows them by; the first one is the default."""

_PYPROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "$name"
version = "0.1.0"
description = "A plugin for vllm-graft: $summary."
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["vllm-graft"]

[project.optional-dependencies]
test = ["pytest"]

[project.entry-points.vllm_graft]
$module = "$module"

[tool.setuptools]
packages = ["$module"]
"""

_README = """# $name

A plugin for [vllm-graft](https://pypi.org/project/vllm-graft/): it implements the hook `$hook`,
$summary.

```
pip install -e '.[test]'
pytest
vllm-graft hooks      # lists the entry $entry, provided by $name
vllm-graft doctor     # says whether the plugin was loaded
```

A server uses it if it is told so:

```
$use
```

Import from `vllm_graft.api` and `vllm_graft.testing`, and from nowhere else below `vllm_graft`.
"""


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
        "pyproject.toml": _PYPROJECT,
        "README.md": _README,
        f"{module}/__init__.py": kind.hooks,
        f"{module}/code.py": kind.code,
        "tests/test_plugin.py": kind.tests,
    }
    return {path: Template(text).substitute(words) for path, text in texts.items()}
