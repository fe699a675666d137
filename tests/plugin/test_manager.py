"""Entries and the plugin manager, with third parties that exist only here."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_graft import builtin, hookimpl, hookspecs
from vllm_graft.config import GraftConfig
from vllm_graft.entries import Entry, Proposer, TreePolicy
from vllm_graft.errors import HookError
from vllm_graft.manager import COLLECTED, Manager

FLAG = "--additional-config.graft.eagle.policy"
MakeEntryPoint = Callable[..., Any]


class Plugin:
    """An object that implements the hooks given."""

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        for name, function in hooks.items():
            setattr(self, name, hookimpl(function))


def _plugin(**hooks: Callable[..., Any]) -> Any:
    return Plugin(**hooks)


def _policy(name: str, load: Any = "json:loads") -> Any:
    return _plugin(graft_tree_policies=lambda: [TreePolicy(name, load, "")])


def _choose(manager: Manager, name: str) -> str:
    return str(manager.choose("graft_tree_policies", name, FLAG).provider.dist)


# --- specifications -------------------------------------------------------------------------


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
    page = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()
    for hook, entry in COLLECTED.items():
        assert f"| `{hook}` | `{entry.__name__}` |" in page


def test_ours_go_through_the_same_hooks() -> None:
    ours = [name for name in vars(builtin) if name.startswith("graft_")]
    assert ours
    assert set(ours) <= set(COLLECTED)
    defaults = GraftConfig.parse({"eagle": {}}).eagle
    assert defaults is not None
    manager = Manager()
    for hook, name in (
        ("graft_proposers", defaults.proposer),
        ("graft_tree_policies", defaults.policy),
        ("graft_draft_graph_runners", defaults.graph_runner),
    ):
        assert manager.choose(hook, name, FLAG).provider.dist == "vllm-graft"


# --- entries --------------------------------------------------------------------------------


def test_an_entry_resolves_a_path_or_a_callable() -> None:
    import json

    assert Entry("x", "json:loads", "").resolve() is json.loads
    assert Entry("x", lambda: 5, "").resolve() == 5


@pytest.mark.parametrize("load", ["json.loads", ":loads", "json:", ""])
def test_an_entry_wants_module_and_attribute(load: str) -> None:
    with pytest.raises(HookError, match=r"package\.module:attribute"):
        Proposer("x", load, "")


@pytest.mark.parametrize("load", ["no_such_module:x", "json:no_such_attribute"])
def test_an_entry_that_cannot_be_loaded_is_named(load: str) -> None:
    with pytest.raises(HookError, match=f"Proposer 'mine' cannot be loaded from '{load}'"):
        Proposer("mine", load, "").resolve()


# --- choosing -------------------------------------------------------------------------------


def test_a_third_party_replaces_ours_by_name(
    entry_point: MakeEntryPoint, caplog: pytest.LogCaptureFixture
) -> None:
    manager = Manager([entry_point("acme", _policy("dynamic"))])
    with caplog.at_level(logging.INFO, logger="vllm.graft"):
        assert _choose(manager, "dynamic") == "acme"
    assert "acme 1.0 replaces vllm-graft's own entry" in caplog.text


def test_another_name_leaves_ours(entry_point: MakeEntryPoint) -> None:
    manager = Manager([entry_point("acme", _policy("wide"))])
    assert _choose(manager, "dynamic") == "vllm-graft"
    assert _choose(manager, "wide") == "acme"


def test_two_third_parties_with_one_name_are_refused(entry_point: MakeEntryPoint) -> None:
    manager = Manager([entry_point("acme", _policy("x")), entry_point("zeta", _policy("x"))])
    with pytest.raises(HookError, match=f"{FLAG}: acme 1.0 and zeta 1.0 both provide 'x'"):
        _choose(manager, "x")
    assert _choose(manager, "dynamic") == "vllm-graft"


def test_an_unknown_name_is_refused_with_a_hint() -> None:
    with pytest.raises(HookError, match=f"{FLAG}: no graft_tree_policies.*'dinamic'.*'dynamic'"):
        _choose(Manager(), "dinamic")


# --- broken third parties -------------------------------------------------------------------


def _raise() -> Any:
    raise RuntimeError("boom")


class Unhashable(Plugin):
    __hash__ = None  # type: ignore[assignment]


BROKEN = {
    "import": ImportError("boom"),
    "unknown hook": _plugin(graft_no_such_hook=lambda: ["boom"]),
    "unknown argument": _plugin(graft_tree_policies=lambda boom: []),
    "raises": _plugin(graft_tree_policies=_raise),
    "wrong type": _plugin(graft_tree_policies=lambda: [Proposer("boom", "json:loads", "")]),
    "no hash": Unhashable(graft_tree_policies=lambda: []),
    "no list": _plugin(graft_tree_policies=lambda: 5),
    "same name twice": _plugin(
        graft_tree_policies=lambda: [TreePolicy("boom", "json:loads", "")] * 2
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_one_is_named_and_takes_nobody_down(
    entry_point: MakeEntryPoint, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    points = [
        entry_point("first", _policy("one")),
        entry_point("bad", BROKEN[fault]),
        entry_point("last", _policy("two")),
    ]
    manager = Manager(points)
    assert [offer.provider.dist for offer in manager.offers("graft_tree_policies")] == [
        "first",
        "last",
        "vllm-graft",
    ]
    assert [provider.dist for provider in manager.broken] == ["bad"]
    assert [provider.dist for provider in manager.third_parties] == ["first", "last"]
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "third-party plugin bad 1.0 (main) is set aside" in warnings[0].getMessage()
    manager.offers("graft_tree_policies")
    assert len(caplog.records) == len(warnings)


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
    monkeypatch.setitem(COLLECTED, "graft_tree_policies", Proposer)
    with pytest.raises(HookError, match="must return Proposer"):
        manager.offers("graft_tree_policies")


# --- configure ------------------------------------------------------------------------------


def test_configure_is_told_once_per_configuration(entry_point: MakeEntryPoint) -> None:
    seen: list[Any] = []

    def remember(config: Any) -> None:
        seen.append(config)

    def fail(config: Any) -> None:
        raise RuntimeError("boom")

    points = [
        entry_point("bad", _plugin(graft_configure=fail)),
        entry_point("acme", _plugin(graft_configure=remember)),
    ]
    manager = Manager(points)
    config = GraftConfig.parse({"eagle": {}})
    manager.configure(config)
    manager.configure(GraftConfig.parse({"eagle": {"topk": "8"}}))
    assert seen == [config]
    assert [provider.dist for provider in manager.broken] == ["bad"]
    manager.configure(GraftConfig())
    assert len(seen) == 2
