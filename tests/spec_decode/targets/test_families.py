"""Which family serves which layer, and that a chain leaves the target's layers alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.targets import families
from vllm_graft.spec_decode.targets.families import Served, ServedLayers, UnchangedFamily


class Recorded:
    """A family that claims layers of one kind, and records what it is given."""

    def __init__(self) -> None:
        self.attached: list[tuple[str, bool]] = []

    def claims(self, layer: Any) -> bool:
        return bool(layer.kind == "known")

    def attach(self, name: str, layer: Any, context: Any, *, is_draft: bool) -> None:
        self.attached.append((name, is_draft))

    def state(self, layers: Any, *args: Any) -> Any:
        return sorted(layers)


def layer(kind: str) -> Any:
    impl = SimpleNamespace(sliding_window=None, sinks=None, alibi_slopes=None)
    return SimpleNamespace(
        kind=kind, impl=impl, kv_sharing_target_layer_name=None, head_size=8, head_size_v=8
    )


LAYERS = {"draft": layer("known"), "one": layer("known"), "two": layer("unknown")}


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    found = Recorded()
    monkeypatch.setattr(families, "families", lambda: [Served(found, ())])
    return found


def test_a_chain_leaves_all_layers_of_the_target_alone(family: Recorded) -> None:
    served = ServedLayers(LAYERS, ["draft"], chain=True)
    served.attach(SimpleNamespace())
    assert family.attached == [("draft", True)]
    assert list(served.attending) == ["draft"]
    [state] = served.states(LAYERS, None, None)  # type: ignore[arg-type]
    # It has nothing to do, before a pass and after one.
    assert (state.fork(None), state.commit(None, None)) == (None, None)  # type: ignore[arg-type]


def test_a_tree_needs_a_family_for_each_layer(family: Recorded) -> None:
    """Negative control."""
    with pytest.raises(ConfigError, match="does not support layers like two"):
        ServedLayers(LAYERS, ["draft"])
    served = ServedLayers({name: LAYERS[name] for name in ("draft", "one")}, ["draft"])
    served.attach(SimpleNamespace())
    assert family.attached == [("draft", True), ("one", False)]
    assert served.states(LAYERS, None, None) == [["one"]]  # type: ignore[arg-type]


def test_a_draft_of_unknown_layers_is_refused_in_a_chain_too(family: Recorded) -> None:
    with pytest.raises(ConfigError, match="does not support layers like two"):
        ServedLayers(LAYERS, ["two"], chain=True)


def test_a_chain_s_family_claims_everything() -> None:
    assert UnchangedFamily().claims(object())
