"""Our classes run, or the engine says why not; vLLM's modules are fakes here."""

import functools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import vllm_graft
from vllm_graft import activation
from vllm_graft.base import log, options
from vllm_graft.base.errors import ConfigError, HookError, NotActiveError, SeamError
from vllm_graft.hooks import manager
from vllm_graft.hooks.entries import Drafter
from vllm_graft.seams import post_import
from vllm_graft.seams.wrap import is_hooked, wrap
from vllm_graft.spec_decode import tree_part
from vllm_graft.spec_decode.verification.accepted_kv import LayerSaves
from vllm_graft.spec_decode.verification.context import Counters

SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
EAGLE = f"{SPECULATORS}.eagle.speculator"
WORKER = "vllm.v1.worker.worker_base"


@pytest.fixture
def unhooked(fake_module: Any, unhooked_part: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The fake vLLM of one test."""

    class Platform:
        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            """The platform's own."""
            vllm_config.seen_by = cls

        @classmethod
        def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
            vllm_config.defaults_by = cls

    class Scheduler:
        def __init__(self, vllm_config: Any) -> None:
            self.vllm_config = vllm_config

    class CudaGraphManager:
        def _init_candidates(self) -> None:
            """vLLM's own."""

    class Base:
        def __init__(self, vllm_config: Any, device: str) -> None:
            self.built_with = (vllm_config, device)

    class EagleSpeculator(Base):
        pass

    class Tree(EagleSpeculator):
        context = SimpleNamespace(
            shape=SimpleNamespace(topk=1), counters=Counters(), saves=LayerSaves()
        )

    class WorkerWrapperBase:
        def __init__(self, worker: Any, vllm_config: Any) -> None:
            self.worker, self.vllm_config = worker, vllm_config
            self.initialized = False

        def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
            self.initialized = True

    fake_module("vllm", __version__="0.32.0")
    fake_module("vllm.platforms", current_platform=Platform())
    fake_module(SPECULATORS)
    fake_module(EAGLE, EagleSpeculator=EagleSpeculator)
    fake_module(WORKER, WorkerWrapperBase=WorkerWrapperBase)
    fake_module("vllm.v1.core.sched.scheduler", Scheduler=Scheduler)
    fake_module("vllm.v1.worker.gpu.cudagraph_utils", CudaGraphManager=CudaGraphManager)
    plugins = unhooked_part(tree_part, tree_part.TREES)
    monkeypatch.setattr(plugins, "_entries", _entries(plugins, Tree))
    monkeypatch.setattr(activation, "_registered", False)
    log.info_once.cache_clear()
    log.warning_once.cache_clear()
    classes = {"platform": Platform, "stock": EagleSpeculator, "tree": Tree}
    return SimpleNamespace(**classes, wrapper=WorkerWrapperBase)


@pytest.fixture
def vllm(unhooked: Any) -> Any:
    """The same, after `register()`."""
    vllm_graft.register()
    return unhooked


def _entries(plugins: manager.Manager, tree: type[Any]) -> Callable[..., Any]:
    real = plugins._entries

    ours = [Drafter("eagle", lambda: tree, "", methods=("eagle", "eagle3"))]
    return lambda hook, provider: ours if hook == "graft_drafters" else real(hook, provider)


def test_register_is_idempotent(vllm: Any) -> None:
    hooked = vllm.platform.__dict__["check_and_update_config"]
    built, initialize = vllm.stock.__new__, vllm.wrapper.initialize_from_config
    vllm_graft.register()
    assert vllm.platform.__dict__["check_and_update_config"] is hooked
    assert vllm.stock.__new__ is built
    assert vllm.wrapper.initialize_from_config is initialize
    assert vllm.platform.check_and_update_config.__doc__ == "The platform's own."


@pytest.mark.parametrize("additional", [{"other": 1}, {"graft": {}}])
def test_without_our_key_nothing_changes(
    vllm: Any, vllm_config: Any, additional: dict[str, Any]
) -> None:
    vllm_config.additional_config = additional
    vllm_config.speculative_config = None
    vllm.platform.check_and_update_config(vllm_config)
    assert vllm_config.seen_by is vllm.platform
    assert bool(vllm_config.parallel_config.worker_extension_cls) is ("graft" in additional)
    assert type(vllm.stock(vllm_config, "cpu")) is vllm.stock
    wrapper = vllm.wrapper(SimpleNamespace(), vllm_config)
    wrapper.initialize_from_config([])
    assert wrapper.initialized


@pytest.mark.parametrize(
    ("tree", "ranks", "error", "words"),
    [
        ({"topkk": 8}, 1, ConfigError, r"tree\.topkk"),
        ({"policy": "dinamic"}, 1, HookError, r"graft\.tree\.policy: no graft_tree_policies"),
        ({}, 2, ConfigError, "--pipeline-parallel-size"),
    ],
)
def test_the_frontend_refuses(
    vllm: Any, vllm_config: Any, tree: dict[str, Any], ranks: int, error: Any, words: str
) -> None:
    vllm_config.additional_config = {"graft": {"tree": tree}}
    vllm_config.parallel_config.pipeline_parallel_size = ranks
    with pytest.raises(error, match=words):
        vllm.platform.check_and_update_config(vllm_config)


def test_each_hook_reads_the_configuration_once(
    vllm: Any, vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(options, "require_plain", lambda value, path: read.append(path))
    vllm.platform.apply_config_platform_defaults(vllm_config)
    assert read == ["--additional-config.graft"]
    vllm.platform.check_and_update_config(vllm_config)
    assert read == ["--additional-config.graft"] * 2


def test_all_that_is_wrong_is_said_before_vllm_reads_any(vllm: Any, vllm_config: Any) -> None:
    vllm_config.additional_config = {
        "graft": {"tree": {"topkk": 8}, "vit": {"memory": 1}, "tre": {}}
    }
    with pytest.raises(ConfigError) as caught:
        vllm.platform.apply_config_platform_defaults(vllm_config)
    for words in ("tree.topkk: unknown key", "vit.memory: 1 is refused", "tre: unknown key"):
        assert f"--additional-config.graft.{words}" in str(caught.value)


def test_the_frontend_says_so_once_and_extends_the_worker(
    vllm: Any, vllm_config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="vllm.graft"):
        vllm.platform.check_and_update_config(vllm_config)
        vllm.platform.check_and_update_config(vllm_config)
    assert vllm_config.parallel_config.worker_extension_cls == "vllm_graft.WorkerExtension"
    assert len(caplog.records) == 1
    for words in ("31 nodes", "topk 8", "steps 6", "policy dynamic (vllm-graft"):
        assert words in caplog.text


def test_another_worker_extension_is_kept(
    vllm: Any, vllm_config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    vllm_config.parallel_config.worker_extension_cls = "mine.Extension"
    vllm.platform.check_and_update_config(vllm_config)
    assert vllm_config.parallel_config.worker_extension_cls == "mine.Extension"
    assert "graft_info" in caplog.text


def test_a_misspelt_top_level_is_refused_or_warned_about(
    vllm: Any, vllm_config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = ("apply_config_platform_defaults", "check_and_update_config")
    for additional in ({"graff": {"tree": {}}}, {"graft": {"tree": {}}, "graft.tree.topk": 4}):
        vllm_config.additional_config = additional
        for hook in hooks:
            with pytest.raises(ConfigError, match=r"is not read\. Write --additional-config"):
                getattr(vllm.platform, hook)(vllm_config)
    vllm_config.additional_config = {"graff": {}}
    for hook in hooks:
        getattr(vllm.platform, hook)(vllm_config)
    assert caplog.text.count("--additional-config.graff is not read by vllm-graft") == 1


def test_the_stock_class_builds_the_chosen_one(vllm: Any, vllm_config: Any) -> None:
    built = vllm.stock(vllm_config, "cpu")
    assert type(built) is vllm.tree
    assert isinstance(built, vllm.stock)
    assert built.built_with == (vllm_config, "cpu")


def test_a_subclass_builds_itself(vllm: Any, vllm_config: Any) -> None:

    class Other(vllm.stock):  # type: ignore[name-defined]
        pass

    assert type(Other(vllm_config, "cpu")) is Other
    assert type(vllm.tree(vllm_config, "cpu")) is vllm.tree


def test_one_process_serves_both_kinds(vllm: Any, vllm_config: Any) -> None:
    assert type(vllm.stock(vllm_config, "cpu")) is vllm.tree
    vllm_config.additional_config = {}
    assert type(vllm.stock(vllm_config, "cpu")) is vllm.stock


def test_moved_seams_stop_the_worker(
    vllm: Any, vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*parts: str) -> None:
        raise SeamError(", ".join(parts))

    monkeypatch.setattr(tree_part, "require_seams", refuse)
    vllm_graft.register()
    with pytest.raises(SeamError, match="core, tree"):
        vllm.stock(vllm_config, "cpu")


def test_a_drafter_must_be_a_subclass(
    vllm: Any, vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = manager.manager()
    monkeypatch.setattr(plugins, "_entries", _entries(plugins, dict))
    with pytest.raises(HookError, match="must be a subclass of vLLM's EagleSpeculator"):
        vllm.stock(vllm_config, "cpu")


def _wrapper(vllm: Any, vllm_config: Any, speculator: Any) -> Any:
    runner = SimpleNamespace(
        speculator=speculator,
        prompt_logprobs_worker=None,
        execute_model=lambda output: None,
        initialize_kv_cache=lambda: None,
    )
    return vllm.wrapper(SimpleNamespace(model_runner=runner), vllm_config)


def test_an_active_worker_goes_on(vllm: Any, vllm_config: Any) -> None:
    wrapper = _wrapper(vllm, vllm_config, vllm.stock(vllm_config, "cpu"))
    vllm_config.parallel_config = SimpleNamespace(data_parallel_size=1)
    wrapper.initialize_from_config([])
    assert wrapper.initialized


@pytest.mark.parametrize("what", ["stock", "none", "no runner"])
def test_an_inactive_worker_stops(unhooked: Any, vllm_config: Any, what: str) -> None:
    stock = unhooked.stock(vllm_config, "cpu")
    vllm_graft.register()
    wrapper = _wrapper(unhooked, vllm_config, stock if what == "stock" else None)
    if what == "no runner":
        wrapper.worker = SimpleNamespace()
    with pytest.raises(NotActiveError, match=r"graft\.tree asks for tree drafts"):
        wrapper.initialize_from_config([])
    assert not wrapper.initialized


def test_a_vllm_without_the_class_stops_only_who_asked(
    unhooked: Any, vllm_config: Any, fake_module: Callable[..., ModuleType]
) -> None:
    fake_module(EAGLE)
    vllm_graft.register()
    vllm = unhooked
    vllm_graft.register()
    with pytest.raises(NotActiveError):
        _wrapper(vllm, vllm_config, vllm.stock(vllm_config, "cpu")).initialize_from_config([])
    vllm_config.additional_config = {}
    _wrapper(vllm, vllm_config, vllm.stock(vllm_config, "cpu")).initialize_from_config([])


@pytest.mark.parametrize(
    ("plugins", "words"),
    [
        ("other", "VLLM_PLUGINS='other' leaves out 'graft'"),
        ("", "VLLM_PLUGINS='' leaves out 'graft'"),
        (None, "entry point is not installed"),
        ("other,graft", "entry point is not installed"),
    ],
)
def test_an_extension_without_register_is_refused(
    monkeypatch: pytest.MonkeyPatch, plugins: str | None, words: str
) -> None:
    monkeypatch.setattr(activation, "_registered", False)
    monkeypatch.delitem(sys.modules, "vllm_graft.extension", raising=False)
    if plugins is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    with pytest.raises(NotActiveError, match=words):
        _ = vllm_graft.WorkerExtension


def test_after_import_waits_then_calls_once(
    unhooked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "awaited_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "awaited_module", raising=False)
    calls: list[int] = []
    post_import.after_import("awaited_module", lambda module: calls.append(module.value))
    assert calls == []
    import awaited_module  # type: ignore[import-not-found]

    assert calls == [1]
    assert type(awaited_module.__loader__).__name__ == "SourceFileLoader"
    post_import.after_import("awaited_module", lambda module: calls.append(2))
    assert calls == [1, 2]
    monkeypatch.delitem(sys.modules, "awaited_module")


def test_several_may_wait_for_one_module_and_each_waits_once(
    unhooked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shared_module.py").write_text("calls = []\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def first(module: Any) -> None:
        module.calls.append("first")

    def second(name: str, module: Any) -> None:
        module.calls.append(name)

    for _ in range(2):
        post_import.after_import("shared_module", first)
        for name in ("one", "two"):
            post_import.after_import("shared_module", functools.partial(second, name))
    import shared_module  # type: ignore[import-not-found]

    assert shared_module.calls == ["first", "one", "two"]
    monkeypatch.delitem(sys.modules, "shared_module")


def test_several_may_be_put_around_one_function_each_once() -> None:
    class Stock:
        def say(self) -> str:
            return "stock"

    def louder(original: Any) -> Any:
        return lambda self: original(self).upper()

    def twice(original: Any) -> Any:
        return lambda self: original(self) * 2

    assert not is_hooked(Stock.say)
    for _ in range(2):
        wrap(Stock, "say", louder)
        wrap(Stock, "say", twice)
    assert is_hooked(Stock.say)
    assert Stock().say() == "STOCKSTOCK"


def test_after_import_of_a_missing_module_stays_an_import_error(unhooked: Any) -> None:
    post_import.after_import("no_such_module_at_all", lambda module: None)
    with pytest.raises(ModuleNotFoundError):
        import no_such_module_at_all  # type: ignore[import-not-found]  # noqa: F401
