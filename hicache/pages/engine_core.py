"""The engine core of this process: what its ranks run, and when somebody replaces its weights. All
orders to an engine that serves go through its ``EngineCore``, in the process of the scheduler and
between two steps. So what is heard of here is heard of before the next request is looked up."""

import enum
import weakref
from types import ModuleType
from typing import Any, Protocol

from vllm_graft.base.log import logger
from vllm_graft.seams.wrap import around

MODULE = "vllm.v1.engine.core"
"""The module whose import :func:`hook` waits for."""

_KEEPS_WEIGHTS = (
    "check_health checkpoint_prepare checkpoint_restore compute_weight_checksums "
    "get_cache_block_size_bytes get_encoder_timing_stats get_kv_cache_spec "
    "get_kv_connector_handshake_metadata get_model_inspection get_supported_tasks graft_info "
    "graft_states init_weight_transfer_engine list_loras pin_lora profile reset_encoder_cache "
    "reset_mm_cache save_sharded_state save_tensorized_model shutdown_weight_transfer_engine "
    "synchronize_device update_max_model_len"
)
KEEPS_WEIGHTS = frozenset(_KEEPS_WEIGHTS.split())
"""Methods of workers that are known to leave the weights alone. A call of any other, such as a
trainer's own extension, counts as a replacement of weights. That may cost a cold cache, while the
opposite mistake would cost wrong tokens."""


class Change(enum.Enum):
    """A change after which K/V of before must not be found any more."""

    WEIGHTS = "weights may have been replaced"
    ADAPTER = "a LoRA adapter was loaded or removed"
    RESET = "the cache was reset"


class Listener(Protocol):
    """Whoever keeps pages of an engine, and is told of each change."""

    def changed(self, change: Change) -> None: ...


_latest: weakref.ref[Any] | None = None
"""The engine core that has loaded its model last; its scheduler is built next."""

_listeners: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()


_unreset: weakref.WeakKeyDictionary[Any, set[Change]] = weakref.WeakKeyDictionary()
"""What has changed since vLLM's own cache on the device was reset. Until then K/V of before is
found there, and is stored as if it were new."""


def core_of(model: str) -> Any:
    """The engine core of this process that serves a model of that name or path; None without one.
    It is for those who are built with the scheduler, when the ranks have loaded the model."""
    core = None if _latest is None else _latest()
    return core if core is not None and core.vllm_config.model_config.model == model else None


def attention_of(worker: Any) -> dict[str, list[str]]:
    """The names of a rank's layers by the attention that they really run with. It runs in each
    worker. Attention is the backend's class and a CPU's instruction set. Flags say what was asked
    for, but trees on a CPU replace vLLM's attention after the pools were made, and vLLM's own CPU
    kernels pack K by the instruction set."""
    layers = worker.vllm_config.compilation_config.static_forward_context
    found: dict[str, list[str]] = {}
    for name, layer in sorted(layers.items()):
        if hasattr(layer, "get_attn_backend"):
            backend = layer.get_attn_backend()
            runs = f"{backend.__module__}.{backend.__qualname__} {getattr(layer, 'isa', '')}"
            found.setdefault(runs.strip(), []).append(name)
    return found


def ask_attention(core: Any) -> dict[str, list[str]]:
    """The layers of all ranks by their attention. Ranks that have the same layers count once."""
    found: dict[str, set[str]] = {}
    for rank in core.collective_rpc(attention_of):
        for runs, layers in rank.items():
            found.setdefault(runs, set()).update(layers)
    return {runs: sorted(layers) for runs, layers in found.items()}


def listen(core: Any, listener: Listener) -> None:
    """Tell a listener of all changes of an engine, as long as both exist."""
    _listeners.setdefault(core, weakref.WeakSet()).add(listener)


def hook(module: ModuleType) -> None:
    """Hear of what happens to engine cores of vLLM's module. Without listeners it does nothing."""

    @around(module.EngineCore, "_initialize_kv_caches")
    def then_remember(original: Any, core: Any, vllm_config: Any) -> Any:
        global _latest
        result = original(core, vllm_config)
        _latest = weakref.ref(core)
        return result

    @around(module.EngineCore, "collective_rpc")
    def then_tell_of_call(original: Any, core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(core, method, *args, **kwargs)
        finally:
            if not _keeps_weights(method):
                _tell(core, Change.WEIGHTS, getattr(method, "__name__", method))

    @around(module.EngineCore, "reset_prefix_cache")
    def then_tell_of_reset(
        original: Any,
        core: Any,
        reset_running_requests: bool = False,
        reset_connector: bool = False,
    ) -> Any:
        done = False
        try:
            done = original(core, reset_running_requests, reset_connector)
            return done
        finally:
            changes = {Change.RESET} if reset_connector else _unreset.get(core, set())
            for change in sorted(changes, key=lambda each: each.value):
                _tell(core, change, original.__name__)
            if done:
                _unreset.pop(core, None)

    _hear(module.EngineCore, "wake_up", Change.WEIGHTS)
    for name in ("add_lora", "remove_lora"):
        _hear(module.EngineCore, name, Change.ADAPTER)


def _hear(owner: Any, name: str, change: Change) -> None:
    @around(owner, name)
    def then_tell(original: Any, core: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(core, *args, **kwargs)
        finally:
            # An order that fails may have been carried out in part.
            _tell(core, change, name)


def _keeps_weights(method: Any) -> bool:
    """Whether a method of workers leaves weights alone. Functions of our own do."""
    if isinstance(method, str):
        return method in KEEPS_WEIGHTS
    return str(getattr(method, "__module__", "")).startswith("vllm_graft.")


def _tell(core: Any, change: Change, order: Any) -> None:
    listeners = list(_listeners.get(core, ()))
    if change is not Change.RESET:
        _unreset[core] = _unreset.get(core, set()) | {change}
    if listeners and change is not Change.RESET:
        logger.info(
            "host KV cache: %s (%s); no K/V of before is used any more, and new K/V is stored "
            "where no other engine finds it.",
            change.value,
            str(order)[:80],
        )
    for listener in listeners:
        listener.changed(change)
