"""How vLLM comes to run our parts, and the proof that it does.

``register()`` prepares each part, and installs three things of its own, all inert until a
configuration asks for a part:

1. the platform's ``check_and_update_config`` also checks what is asked of our parts, and its
   ``apply_config_platform_defaults``, which comes first, refuses what is misspelt, decides presets
   and lets parts fill in what follows from their sections;
2. a worker that has loaded its model checks that what was asked for runs;
3. what the parts count reaches ``/metrics`` (`vllm_graft.metrics`).

Workers unpickle their configuration and never see (1): the parts' own hooks read it themselves."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm_graft.automatic import decide, settle
from vllm_graft.base.errors import ConfigError, NotActiveError
from vllm_graft.base.log import info_once, warning_once
from vllm_graft.base.part import Part
from vllm_graft.base.version import __version__
from vllm_graft.config import GraftConfig, read
from vllm_graft.hooks import manager
from vllm_graft.metrics.wiring import Wiring
from vllm_graft.parts import PARTS
from vllm_graft.seams.permission import admit
from vllm_graft.seams.post_import import after_import
from vllm_graft.seams.wrap import MARK, around, is_hooked

if TYPE_CHECKING:
    from vllm.config import VllmConfig

EXTENSION = "vllm_graft.WorkerExtension"
PLUGIN_NAME = "graft"

_WORKER_MODULE = "vllm.v1.worker.worker_base"

_registered = False


def install() -> None:
    """Install the hooks; again does nothing more."""
    global _registered
    from vllm.platforms import current_platform

    manager.read_configuration = GraftConfig.from_vllm
    _hook_platform(type(current_platform))
    after_import(_WORKER_MODULE, _hook_worker)
    for part in PARTS:
        part.install()
    METRICS.install()
    _registered = True


def require_registered() -> None:
    """Raise NotActiveError, with the cause, where vLLM has not called ``register()``."""
    if _registered:
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        reason = f"VLLM_PLUGINS={allowed!r} leaves out {PLUGIN_NAME!r}: add it, or unset it"
    else:
        reason = "its entry point is not installed here (run `vllm-graft doctor` on this machine)"
    raise NotActiveError(f"{EXTENSION} was asked for, but vLLM did not load vllm-graft: {reason}.")


def asked_for(vllm_config: Any) -> list[tuple[Part, Any]]:
    """Parts that a configuration asks for, each with its section; ConfigError for a wrong key."""
    return sections_of(GraftConfig.from_vllm(vllm_config), vllm_config)


def sections_of(config: GraftConfig | None, vllm_config: Any) -> list[tuple[Part, Any]]:
    """The same for a configuration that is parsed already."""
    config = config or GraftConfig()
    sections = [(part, part.section(config, vllm_config)) for part in PARTS]
    return [(part, section) for part, section in sections if section is not None]


METRICS = Wiring(PARTS, asked_for, EXTENSION)


def on_defaults(vllm_config: VllmConfig) -> None:
    """Refuse what is misspelt (ConfigError) before vLLM reads it, and fill in our defaults."""
    named = sections_of(read(vllm_config), vllm_config)
    for part, section in named:
        part.fill_in(section, vllm_config)
    decide({part.name for part, _ in named}, vllm_config)


def on_config(vllm_config: VllmConfig) -> GraftConfig | None:
    """Check a configuration, in each process that has it, say what it will run, and make the
    workers answer for it. Raises `ConfigError` for a wrong key or value, an unknown entry or an
    unsupported combination, and `SeamError` for a vLLM that was neither tested nor proven."""
    config = settle(read(vllm_config), vllm_config)
    asked = sections_of(config, vllm_config)
    for part, section in asked:
        refuse(part, section, vllm_config)
    seams = {room for part, section in asked for room in part.seams(section, vllm_config)}
    admit(sorted(seams), vllm_config)
    if config is not None:
        manager.manager().configure(config)
    for part, section in asked:
        info_once(f"vllm-graft {__version__}: {part.describe(section, vllm_config)}")
    if asked or config is not None:
        _extend_worker(vllm_config.parallel_config)
    return config


def refuse(part: Part, section: Any, vllm_config: Any) -> None:
    """Raise ConfigError, with a sentence for each thing to change, if a part cannot serve it."""
    if problems := list(part.refuses(section, vllm_config)):
        head = f"{part.flag} asks for {part.asks_for}, which this configuration rules out:"
        raise ConfigError("\n  ".join([head, *problems]))


def verify_active(worker: Any, vllm_config: VllmConfig) -> None:
    """Raise NotActiveError if a worker that has loaded its model lacks a part asked for."""
    for part, section in asked_for(vllm_config):
        part.verify(section, worker, vllm_config)


def _hook_platform(platform: type[Any]) -> None:
    _then(platform, "apply_config_platform_defaults", on_defaults)
    _then(platform, "check_and_update_config", on_config)


def _then(platform: type[Any], name: str, ours: Callable[[VllmConfig], object]) -> None:
    """Let a platform's classmethod of a configuration call `ours` when it has done its work."""
    original = getattr(platform, name)
    if is_hooked(original):
        return

    @functools.wraps(original.__func__)
    def hooked(cls: type[Any], vllm_config: VllmConfig) -> None:
        original.__func__(cls, vllm_config)
        ours(vllm_config)

    setattr(hooked, MARK, (f"{ours.__module__}.{ours.__qualname__}",))
    setattr(platform, name, classmethod(hooked))


def _hook_worker(module: ModuleType) -> None:
    @around(module.WorkerWrapperBase, "initialize_from_config")
    def verify_first(original: Any, self: Any, kv_cache_configs: list[Any]) -> None:
        verify_active(self.worker, self.vllm_config)
        METRICS.watch_worker(self.worker, self.vllm_config)
        original(self, kv_cache_configs)


def _extend_worker(parallel_config: Any) -> None:
    current = parallel_config.worker_extension_cls
    if not current:
        parallel_config.worker_extension_cls = EXTENSION
    elif current != EXTENSION:
        warning_once(
            f"--worker-extension-cls is {current}: collective_rpc('graft_info') is not available "
            f"unless that class inherits from {EXTENSION}"
        )
