"""Orders to an engine core that may replace weights are told to whoever keeps its pages."""

import gc
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_graft.hicache.pages import engine_core
from vllm_graft.hicache.pages.engine_core import Change, attention_of


class _Core:
    """vLLM's engine core, as far as the hooks know it."""

    def __init__(self, model: str = "model") -> None:
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(model=model))
        self.carried_out: list[Any] = []

    def _initialize_kv_caches(self, vllm_config: Any) -> str:
        return "kv"

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> list[Any]:
        self.carried_out.append(method)
        if method == "breaks":
            raise RuntimeError(method)
        return [method(worker) for worker in _WORKERS] if callable(method) else []

    def wake_up(self, tags: list[str] | None = None) -> bool:
        return True

    def add_lora(self, lora_request: Any) -> bool:
        return True

    def remove_lora(self, lora_id: int) -> bool:
        return True

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return reset_running_requests


class _Pages:
    def __init__(self) -> None:
        self.changes: list[Change] = []

    def changed(self, change: Change) -> None:
        self.changes.append(change)


def _layer(backend: type, **attributes: Any) -> Any:
    return SimpleNamespace(get_attn_backend=lambda: backend, **attributes)


def _worker(**layers: Any) -> Any:
    config = SimpleNamespace(static_forward_context=layers)
    return SimpleNamespace(vllm_config=SimpleNamespace(compilation_config=config))


_WORKERS = [
    _worker(a=_layer(dict), b=_layer(list, isa="amx"), experts=SimpleNamespace()),
    _worker(a=_layer(dict), c=_layer(dict)),
]


@pytest.fixture
def cores() -> type[_Core]:
    """Make a class of engine cores of its own, and hook it as vLLM's is."""
    found = type("EngineCore", (_Core,), dict(vars(_Core)))
    module = ModuleType("core")
    module.EngineCore = found  # type: ignore[attr-defined]
    engine_core.hook(module)
    engine_core.hook(module)
    return found


def _trainer(worker: Any) -> None:
    """Stand for a function that somebody else sends to the workers."""


@pytest.mark.parametrize(
    "method",
    [
        "reload_weights",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "reset_weights",
        "load_weights",
        "apply_model",
        "update_weights_from_ipc_handles",
        "sleep",
        "wake_up",
        _trainer,
    ],
)
def test_calls_that_may_replace_weights(cores: type[_Core], method: Any) -> None:
    core, pages = cores(), _Pages()
    core.collective_rpc(method)
    engine_core.listen(core, pages)
    core.collective_rpc(method, 1.0, args=(1,))
    assert pages.changes == [Change.WEIGHTS]


def test_calls_that_leave_weights_alone(cores: type[_Core]) -> None:
    core, pages = cores(), _Pages()
    engine_core.listen(core, pages)
    for method in (*engine_core.KEEPS_WEIGHTS, attention_of):
        core.collective_rpc(method)
    assert pages.changes == []
    assert len(core.carried_out) == len(engine_core.KEEPS_WEIGHTS) + 1


def test_a_call_that_fails_may_have_been_carried_out_in_part(cores: type[_Core]) -> None:
    core, pages = cores(), _Pages()
    engine_core.listen(core, pages)
    with pytest.raises(RuntimeError, match="breaks"):
        core.collective_rpc("breaks")
    assert pages.changes == [Change.WEIGHTS]


def test_other_orders(cores: type[_Core]) -> None:
    core, pages = cores(), _Pages()
    engine_core.listen(core, pages)
    assert core.wake_up(tags=["weights"])
    assert core.add_lora(object())
    assert core.remove_lora(1)
    assert core.reset_prefix_cache(True, True)
    assert not core.reset_prefix_cache()
    assert not core.reset_prefix_cache(reset_connector=True)
    expected = [Change.WEIGHTS, Change.ADAPTER, Change.ADAPTER, Change.RESET, Change.RESET]
    assert pages.changes == expected


@pytest.mark.parametrize(
    ("order", "change"), [("wake_up", Change.WEIGHTS), ("add_lora", Change.ADAPTER)]
)
def test_a_reset_of_the_device_alone_ends_a_change(
    cores: type[_Core], order: str, change: Change
) -> None:
    """Until then vLLM finds K/V of before on the device, which is stored as if it were new."""
    core, pages = cores(), _Pages()
    engine_core.listen(core, pages)
    getattr(core, order)(object())
    assert not core.reset_prefix_cache(reset_connector=False)
    assert pages.changes == [change, change]
    # The device still has blocks of before: this reset has failed.
    assert core.reset_prefix_cache(True)
    assert pages.changes == [change, change, change]
    core.reset_prefix_cache()
    assert pages.changes == [change, change, change]


def test_another_engine_and_pages_that_are_gone_are_not_told(cores: type[_Core]) -> None:
    first, second, pages, gone = cores(), cores(), _Pages(), _Pages()
    engine_core.listen(first, pages)
    engine_core.listen(first, gone)
    del gone
    gc.collect()
    second.collective_rpc("reload_weights")
    assert pages.changes == []
    first.collective_rpc("reload_weights")
    assert pages.changes == [Change.WEIGHTS]


def test_the_scheduler_s_side_finds_the_core_that_has_loaded_its_model(
    cores: type[_Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_core, "_latest", None)
    assert engine_core.core_of("model") is None
    core = cores()
    assert core._initialize_kv_caches(core.vllm_config) == "kv"
    assert engine_core.core_of("model") is core
    assert engine_core.core_of("another") is None
    del core
    gc.collect()
    assert engine_core.core_of("model") is None


def test_ranks_tell_what_their_layers_run(cores: type[_Core]) -> None:
    """Equal ranks count once; the instruction set of a CPU's kernels is told apart."""
    assert engine_core.ask_attention(cores()) == {
        "builtins.dict": ["a", "c"],
        "builtins.list amx": ["b"],
    }
