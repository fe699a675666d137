"""Entries and the plugin manager, with third parties that exist only here."""

import asyncio
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graft import hookimpl
from vllm_graft.base.errors import ConfigError, EntryError, HookError
from vllm_graft.config import GraftConfig
from vllm_graft.hooks import builtin, hookspecs
from vllm_graft.hooks.entries import Drafter, Entry, TreePolicy
from vllm_graft.hooks.manager import COLLECTED, Manager
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.models.drafts import chosen

FLAG = "--additional-config.graft.tree.policy"
MakeEntryPoint = Callable[..., Any]


class Plugin:
    """An object that implements the hooks given."""

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        for name, function in hooks.items():
            setattr(self, name, hookimpl(function))


def _policies(*entries: Any) -> Any:
    return Plugin(graft_tree_policies=lambda: [*entries])


def _policy(name: str) -> Any:
    return _policies(TreePolicy(name, "json:loads", ""))


def _choose(manager: Manager, name: str) -> str:
    return str(manager.choose("graft_tree_policies", name, FLAG).provider.dist)


def test_every_specification_has_an_example_and_the_prefix() -> None:
    specs = [
        function
        for name, function in inspect.getmembers(hookspecs, inspect.isfunction)
        if function.__module__ == hookspecs.__name__
    ]
    assert {spec.__name__ for spec in specs} == {*COLLECTED, "graft_configure"}
    for spec in specs:
        assert "Example::" in (spec.__doc__ or "")
        assert f"def {spec.__name__}(" in (spec.__doc__ or "")


def test_the_documentation_lists_every_hook() -> None:
    page = (Path(__file__).parents[3] / "docs" / "hooks.md").read_text()
    for hook, entry in COLLECTED.items():
        assert f"| `{hook}` | `{entry.__name__}` |" in page


def test_ours_go_through_the_same_hooks() -> None:
    ours = [name for name in vars(builtin) if name.startswith("graft_")]
    assert ours
    assert set(ours) <= set(COLLECTED)
    defaults = GraftConfig.parse({"tree": {}}).tree
    assert defaults is not None
    manager = Manager()
    for hook, name in (
        ("graft_drafters", chosen(defaults, SimpleNamespace(method="eagle3")).entry.name),
        ("graft_tree_policies", defaults.policy),
        ("graft_draft_graph_runners", defaults.graph_runner),
    ):
        assert manager.choose(hook, name, FLAG).provider.dist == "vllm-graft"


@pytest.mark.parametrize(
    ("method", "architecture", "name"),
    [
        ("dflash", "DFlashDraftModel", "dflash"),
        ("dflash", "DFlashLagunaForCausalLM", "dflash"),
        ("dflash", "DFlash2DraftModel", "dflash2"),
        ("dflash", "LiLiCorrDraftModel", "lilicorr"),
        ("dflash", "DFlashQwen3XPressModel", "xpress"),
        ("dspark", "Qwen3DSparkModel", "dspark"),
    ],
)
def test_a_drafter_for_the_architecture_goes_first(
    method: str, architecture: str, name: str
) -> None:
    draft = SimpleNamespace(architectures=[architecture])
    speculative = SimpleNamespace(method=method, draft_model_config=draft)
    entry = chosen(TreeConfig(), speculative).entry
    assert isinstance(entry, Drafter)
    assert (entry.name, entry.block) == (name, True)


def test_a_drafter_for_other_architectures_is_refused() -> None:
    draft = SimpleNamespace(architectures=["DFlashDraftModel"])
    speculative = SimpleNamespace(method="dflash", draft_model_config=draft)
    with pytest.raises(ConfigError, match="drafts with LiLiCorrDraftModel, but the draft's archit"):
        chosen(TreeConfig(drafter="lilicorr"), speculative)


def test_an_entry_resolves_a_path_or_a_callable() -> None:
    import json

    assert Entry("x", "json:loads", "").resolve() is json.loads
    assert Entry("x", lambda: 5, "").resolve() == 5


@pytest.mark.parametrize("load", ["json.loads", ":loads", "json:", "", 5, None])
def test_an_entry_wants_module_and_attribute(load: Any) -> None:
    with pytest.raises(HookError, match=r"package\.module:attribute"):
        Drafter("x", load, "")


@pytest.mark.parametrize("load", ["no_such_module:x", "json:no_such_attribute"])
def test_an_entry_that_cannot_be_loaded_is_named(load: str) -> None:
    with pytest.raises(HookError, match=f"Drafter 'mine' cannot be loaded from '{load}'"):
        Drafter("mine", load, "").resolve()


@pytest.mark.parametrize("name", [5, None, [], "", "a\nb", "\udc80", b"x"])
def test_an_entry_s_name_is_a_text(name: Any) -> None:
    with pytest.raises(HookError, match=r"TreePolicy: name=.* must be a text"):
        TreePolicy(name, "json:loads", "")


def test_an_entry_that_exits_while_it_is_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "graft_exits.py").write_text("raise SystemExit('bye')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EntryError, match=r"'mine' cannot be loaded from 'graft_exits:x'.*bye"):
        Drafter("mine", "graft_exits:x", "").resolve()
    with pytest.raises(EntryError, match=r"'mine' cannot be loaded from .*SystemExit: 3"):
        Drafter("mine", lambda: sys.exit(3), "").resolve()


def test_nobody_catches_an_interrupt(entry_point: MakeEntryPoint) -> None:
    def interrupt() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Drafter("mine", interrupt, "").resolve()
    with pytest.raises(KeyboardInterrupt):
        Manager([entry_point("bad", KeyboardInterrupt())])


def test_a_third_party_replaces_ours_by_name(
    entry_point: MakeEntryPoint, caplog: pytest.LogCaptureFixture
) -> None:
    manager = Manager([entry_point("acme", _policy("dynamic"))])
    with caplog.at_level(logging.INFO, logger="vllm.graft"):
        assert _choose(manager, "dynamic") == "acme"
    assert "acme 1.0 replaces vllm-graft's own entry" in caplog.text


def test_two_third_parties_with_one_name_are_refused(entry_point: MakeEntryPoint) -> None:
    names = {"acme": "x", "zeta": "x", "other": "wide"}
    manager = Manager([entry_point(dist, _policy(name)) for dist, name in names.items()])
    with pytest.raises(HookError, match=f"{FLAG}: acme 1.0 and zeta 1.0 both provide 'x'"):
        _choose(manager, "x")
    # Another name leaves ours.
    assert _choose(manager, "dynamic") == "vllm-graft"
    assert _choose(manager, "wide") == "other"


def test_an_unknown_name_is_refused_with_a_hint() -> None:
    # A wrong name is the configuration's fault as well.
    assert issubclass(EntryError, ConfigError)
    assert issubclass(EntryError, HookError)
    with pytest.raises(EntryError, match=f"{FLAG}: no graft_tree_policies.*'dinamic'.*'dynamic'"):
        _choose(Manager(), "dinamic")


def _raise() -> Any:
    raise RuntimeError("boom")


def _exit() -> Any:
    sys.exit(3)


def _yield_and_exit() -> Iterator[TreePolicy]:
    yield TreePolicy("boom", "json:loads", "")
    sys.exit(3)


def _renamed(**attributes: Any) -> Any:
    """Make a plugin that has changed its entry behind our back."""
    entry = TreePolicy("boom", "json:loads", "")
    for name, value in attributes.items():
        object.__setattr__(entry, name, value)
    return _policies(entry)


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("boom")


BROKEN = {
    "import": ImportError("boom"),
    "exits at import": SystemExit(3),
    "exits": Plugin(graft_tree_policies=_exit),
    "exits in a generator": Plugin(graft_tree_policies=_yield_and_exit),
    "cancelled": asyncio.CancelledError(),
    "no text of its error": Speechless(),
    "a name that is no text": _renamed(name=5),
    "a name without hash": _renamed(name=["boom"]),
    "a name of two lines": _renamed(name="bo\nom"),
    "no name": _renamed(name=None),
    "a summary that is no text": _renamed(summary=None),
    "a load that is no text": _renamed(load=5),
    "a mapping": Plugin(graft_tree_policies=lambda: {"boom": "json:loads"}),
    "a text": Plugin(graft_tree_policies=lambda: "boom"),
    "unknown hook": Plugin(graft_no_such_hook=lambda: ["boom"]),
    "unknown argument": Plugin(graft_tree_policies=lambda boom: []),
    "raises": Plugin(graft_tree_policies=_raise),
    "wrong type": _policies(Drafter("boom", "json:loads", "")),
    "no list": Plugin(graft_tree_policies=lambda: 5),
    "same name twice": _policies(*[TreePolicy("boom", "json:loads", "")] * 2),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_one_is_named_and_takes_nobody_down(
    entry_point: MakeEntryPoint, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    plugins = {"first": _policy("one"), "bad": BROKEN[fault], "last": _policy("two")}
    manager = Manager([entry_point(name, plugin) for name, plugin in plugins.items()])
    found = [offer.provider.dist for offer in manager.offers("graft_tree_policies")]
    assert found == ["first", "last", "vllm-graft", "vllm-graft"]
    assert [provider.dist for provider in manager.broken] == ["bad"]
    assert [provider.dist for provider in manager.third_parties] == ["first", "last"]
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "third-party plugin bad 1.0 (main) is set aside" in warnings[0].getMessage()
    manager.offers("graft_tree_policies")
    assert len(caplog.records) == len(warnings)


@pytest.mark.parametrize("fault", [fault for fault in BROKEN if " name" in fault])
def test_a_misspelt_name_stays_a_sentence_beside_a_broken_one(
    entry_point: MakeEntryPoint, fault: str
) -> None:
    manager = Manager([entry_point("bad", BROKEN[fault])])
    with pytest.raises(EntryError, match=r"Did you mean 'dynamic'\? Not loaded: bad 1\.0 \(Hook"):
        _choose(manager, "dinamic")


class Unhashable(Plugin):
    __hash__ = None  # type: ignore[assignment]


class Equal(Plugin):
    """A plugin that is equal to every object."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return True


class Incomparable(Plugin):
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("boom")


@pytest.mark.parametrize("kind", [Unhashable, Equal, Incomparable])
def test_an_odd_object_is_nobody_else_s_trouble(
    entry_point: MakeEntryPoint, kind: type[Plugin]
) -> None:
    odd = kind(graft_tree_policies=lambda: [TreePolicy("odd", "json:loads", "")])
    points = [entry_point("odd", odd), entry_point("last", _policy("two"))]
    manager = Manager(points)
    assert [_choose(manager, name) for name in ("odd", "two")] == ["odd", "last"]
    assert manager.broken == {}


def test_a_hook_may_return_nothing_or_a_generator(entry_point: MakeEntryPoint) -> None:
    def generate() -> Iterator[TreePolicy]:
        yield TreePolicy("one", "json:loads", "")
        yield TreePolicy("two", "json:loads", "")

    hooks = {"none": lambda: None, "generator": generate}
    points = [entry_point(name, Plugin(graft_tree_policies=hook)) for name, hook in hooks.items()]
    manager = Manager(points)
    assert [_choose(manager, name) for name in ("one", "two")] == ["generator"] * 2
    assert manager.broken == {}


def test_two_with_the_same_names_are_told_apart(entry_point: MakeEntryPoint) -> None:
    points = [
        entry_point("acme", _policy("one")),
        entry_point("acme", ImportError("boom")),
        entry_point("acme", _policy("two")),
        entry_point("vllm-graft", _policy("three"), "builtin"),
    ]
    manager = Manager(points)
    chosen = [_choose(manager, name) for name in ("one", "two", "three")]
    assert chosen == ["acme", "acme", "vllm-graft"]
    assert [provider.plugin for provider in manager.third_parties] == ["main", "main #3", "builtin"]
    assert [provider.plugin for provider in manager.broken] == ["main #2"]


@pytest.mark.parametrize("dist", [None, "nameless"])
def test_a_distribution_without_a_name_is_shown_all_the_same(
    entry_point: MakeEntryPoint, dist: str | None
) -> None:
    point = entry_point("acme", _policy("one"))
    point.dist = None if dist is None else SimpleNamespace(name=None, version=None)
    assert str(Manager([point]).third_parties[0]) == "unknown distribution ?"


def test_one_object_twice_keeps_the_first(entry_point: MakeEntryPoint) -> None:
    plugin = _policy("one")
    manager = Manager([entry_point("first", plugin), entry_point("again", plugin)])
    assert _choose(manager, "one") == "first"
    assert [provider.dist for provider in manager.broken] == ["again"]


def test_the_excuse_names_the_broken_one(entry_point: MakeEntryPoint) -> None:
    manager = Manager([entry_point("bad", ImportError("boom"))])
    with pytest.raises(HookError, match=r"Not loaded: bad 1\.0 \(ImportError: boom\)"):
        _choose(manager, "theirs")


def test_an_error_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Manager()
    monkeypatch.setitem(COLLECTED, "graft_tree_policies", Drafter)
    with pytest.raises(HookError, match="must return Drafter"):
        manager.offers("graft_tree_policies")


def test_configure_is_told_once_per_configuration(entry_point: MakeEntryPoint) -> None:
    seen: list[Any] = []

    def fail(config: Any) -> None:
        raise RuntimeError("boom")

    plugins = {"bad": fail, "acme": lambda config: seen.append(config)}
    points = [entry_point(name, Plugin(graft_configure=hook)) for name, hook in plugins.items()]
    manager = Manager(points)
    config = GraftConfig.parse({"tree": {}})
    manager.configure(config)
    manager.configure(GraftConfig.parse({"tree": {"topk": "8"}}))
    assert seen == [config]
    assert [provider.dist for provider in manager.broken] == ["bad"]
    manager.configure(GraftConfig())
    assert len(seen) == 2
