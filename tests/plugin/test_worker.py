"""The worker extension, the counters it reports, and the ModelState composer."""

import json
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_graft import activation
from vllm_graft.base import info
from vllm_graft.base.errors import GraftError
from vllm_graft.seams import compare as seams
from vllm_graft.seams.wrap import compose


@pytest.fixture(autouse=True)
def _no_parts() -> Iterator[None]:
    info.clear()
    yield
    info.clear()


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    monkeypatch.setattr(activation, "_registered", True)
    from vllm_graft import WorkerExtension

    return WorkerExtension


def test_graft_info_is_plain_and_complete(
    extension: type[Any], vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams, "check_seams", lambda parts: [])
    info.publish("tree", lambda: {"steps": 3})
    mixed = type("Worker", (SimpleNamespace, extension), {})(vllm_config=vllm_config)
    answer = mixed.graft_info()
    assert json.loads(json.dumps(answer)) == answer
    assert answer["parts"] == ["tree"]
    assert answer["counters"] == {"tree": {"steps": 3}}
    assert mixed.graft_states() == {"on": ["tree"], "declined": {}}
    assert answer["config"]["tree"]["topk"] == 8
    assert set(answer) == {
        "version", "config", "parts", "counters", "seams", "preset", "plugins", "broken_plugins",
    }  # fmt: skip


def test_graft_info_without_our_key(extension: type[Any], vllm_config: Any) -> None:
    vllm_config.additional_config = {}
    answer = type("Worker", (SimpleNamespace, extension), {})(vllm_config=vllm_config).graft_info()
    assert answer["config"] is None
    assert answer["parts"] == []


def test_the_extension_adds_two_public_names(extension: type[Any]) -> None:
    # vLLM refuses an extension that shares a name with its worker.
    names = [name for name in dir(extension) if not name.startswith("__")]
    assert names == ["graft_info", "graft_states"]


def test_one_failing_counter_does_not_hide_the_others() -> None:
    def fail() -> dict[str, int]:
        raise RuntimeError("boom")

    info.publish("a", fail)
    info.publish("b", lambda: {"x": 1})
    assert info.collect() == {"a": {"error": "RuntimeError: boom"}, "b": {"x": 1}}
    info.publish("a", lambda: {"y": 2})
    assert info.collect()["a"] == {"y": 2}


def test_a_weak_provider_keeps_nothing_alive() -> None:
    class Part:
        def report(self) -> dict[str, int]:
            return {"x": 1}

    part = Part()
    info.publish("a", info.weakly(part.report))
    assert info.collect() == {"a": {"x": 1}}
    gone = weakref.ref(part)
    del part
    assert gone() is None
    assert info.collect() == {"a": {}}


class Default:
    """A stand-in for vLLM's ModelState."""

    def hook(self) -> list[str]:
        return ["default"]


class Outer:
    def hook(self) -> list[str]:
        return ["outer", *super().hook()]  # type: ignore[misc]


class Inner:
    def hook(self) -> list[str]:
        return ["inner", *super().hook()]  # type: ignore[misc]


@pytest.fixture
def resolve(fake_module: Callable[..., ModuleType]) -> Callable[[Any], type[Any]]:
    def resolve_model_state_cls(vllm_config: Any, model: Any) -> type[Any]:
        if hasattr(model, "get_model_state_cls"):
            return model.get_model_state_cls()
        return Default

    fake_module("vllm.v1.worker.gpu.model_states", resolve_model_state_cls=resolve_model_state_cls)
    return lambda model: resolve_model_state_cls(None, model)


def test_mixins_stack(resolve: Callable[[Any], type[Any]]) -> None:
    model: Any = SimpleNamespace()
    first = compose(model, None, Inner)
    assert resolve(model) is first
    second = compose(model, None, Outer)
    assert resolve(model) is second
    assert issubclass(second, first)
    assert second().hook() == ["outer", "inner", "default"]
    assert second.__name__ == "OuterOverInnerOverDefault"


def test_a_model_with_its_own_class_keeps_it(resolve: Callable[[Any], type[Any]]) -> None:
    class Own(Default):
        pass

    class Model:
        def get_model_state_cls(self) -> type[Any]:
            return Own

    model: Any = Model()
    assert issubclass(compose(model, None, Inner), Own)
    assert Model().get_model_state_cls() is Own
    assert resolve(Model()) is Own


def test_the_same_mixin_twice_is_refused(resolve: Callable[[Any], type[Any]]) -> None:
    model: Any = SimpleNamespace()
    compose(model, None, Inner)
    compose(model, None, Outer)
    with pytest.raises(GraftError, match="Inner is already part of OuterOverInnerOverDefault"):
        compose(model, None, Inner)
