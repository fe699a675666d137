"""The part ``graft.vit``: how vLLM comes to run our vision graphs. ``EncoderCudaGraphManager``,
asked to build itself, builds the chosen runner, a subclass of it. vLLM builds one only for a model
that speaks its encoder protocol: just before, in either model runner, a model that does not gets
the adapter of its architecture."""

import functools
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from vllm_graft.base import info
from vllm_graft.base.decision import Preset, decline_or_raise
from vllm_graft.base.errors import ConfigError, GraftError, HookError, NotActiveError
from vllm_graft.base.log import info_once
from vllm_graft.base.options import flag, target_of
from vllm_graft.base.part import Offer, Part
from vllm_graft.base.refusal import Refusal
from vllm_graft.graph_runners.vision.graphs.vision_metrics import METRICS
from vllm_graft.graph_runners.vision.vision_config import NAME, VitConfig
from vllm_graft.graph_runners.vision.vision_refusals import REFUSALS
from vllm_graft.hooks import manager
from vllm_graft.seams.compare import vllm_version
from vllm_graft.seams.permission import require_seams
from vllm_graft.seams.post_import import after_import
from vllm_graft.seams.wrap import BuiltClasses, around, build_instead, is_hooked

_MANAGER_MODULE = "vllm.v1.worker.encoder_cudagraph"
_V2_MODULE = "vllm.v1.worker.gpu.model_states.interface"
_V1_MODULE = "vllm.v1.worker.gpu_model_runner"
_HOOK = "graft_vision_adapters"
_DROP = f"drop {flag('vit')}, or serve another model"


class VisionPart(Part):
    """Vision-encoder graphs."""

    name = NAME
    asks_for = "vision-encoder graphs"
    flag = flag(NAME)
    refusals: Sequence[Refusal] = REFUSALS
    metrics = METRICS

    def __init__(self) -> None:
        self.built = BuiltClasses("encodes images")

    def install(self) -> None:
        after_import(_MANAGER_MODULE, self._hook_manager)
        after_import(_V2_MODULE, _hook_model_state)
        after_import(_V1_MODULE, _hook_v1_runner)

    def automatic(self, preset: Preset, vllm_config: Any) -> Offer | str:
        model = target_of(vllm_config)
        if model is not None and model.multimodal_config is None:
            return ""
        says = f"vision graphs in {VitConfig().memory} MiB of the device's memory"
        return Offer(VitConfig(), says)

    def foresees(self, asked: VitConfig, vllm_config: Any) -> Iterator[str]:
        """Yield why no adapter serves the model's class, which is imported to look."""
        from vllm.model_executor.models import registry

        look = functools.partial(_encodes, vllm_config.model_config)
        try:
            # As vLLM itself looks at classes: some can't be imported without their device.
            name, speaks = registry._run_in_subprocess(look)
        except Exception:
            return
        try:
            _adapter_for(name, vllm_config, speaks=speaks)
        except GraftError as refused:
            yield str(refused)

    def describe(self, asked: VitConfig, vllm_config: Any) -> str:
        """Turn vLLM's encoder graphs on, and say which runner will capture them."""
        vllm_config.compilation_config.cudagraph_mm_encoder = True
        offer = _offer(asked)
        chosen = f"runner {offer.entry.name} ({offer.provider})"
        return f"vision graphs in {asked.memory} MiB; {chosen}"

    def verify(self, asked: VitConfig, worker: Any, vllm_config: Any) -> None:
        """Check that the worker encodes with a class of ours; note it where a preset asks. V2 has
        built its manager by then. V1 builds one when it captures: the hooks have to be in place."""
        runner = getattr(worker, "model_runner", None)
        state = getattr(runner, "model_state", None)
        found = getattr(getattr(state, "encoder_runner", None), "cudagraph_manager", None)
        # Only the first rank of a pipeline encodes.
        if type(found) in self.built or not getattr(runner, "is_first_pp_rank", True):
            return
        create = getattr(type(runner), "_create_encoder_cudagraph_manager", None)
        if state is None and is_hooked(create):
            adapt(runner.get_model(), vllm_config)  # type: ignore[union-attr]
            return
        refused = NotActiveError(
            f"{self.flag} asks for vision graphs, but {type(runner).__module__}."
            f"{type(runner).__name__} of vLLM {vllm_version()} encodes with "
            f"{type(found).__name__}. Drop the flag, or serve a model with a vision encoder "
            "(`vllm-graft doctor` shows what has moved)."
        )
        if NAME not in info.declined():
            decline_or_raise(NAME, refused, vllm_config)

    def runner_class(self, stock: type[Any], vllm_config: Any) -> type[Any]:
        """The class to build for ``EncoderCudaGraphManager(...)``: ``stock`` without our section.
        Raises `SeamError` if the runner was not written for this vLLM, and `HookError` if the
        chosen one is not a subclass of ``stock``."""
        vit = VitConfig.from_vllm(vllm_config)
        if vit is None:
            return stock
        require_seams("core", NAME)
        chosen: type[Any] = _offer(vit).entry.resolve()
        if not (isinstance(chosen, type) and issubclass(chosen, stock)):
            raise HookError(
                f"{flag(NAME, 'runner')}={vit.runner}: {chosen!r} must be a subclass of vLLM's "
                f"{stock.__name__}"
            )
        return chosen

    def _hook_manager(self, module: ModuleType) -> None:
        stock = getattr(module, "EncoderCudaGraphManager", None)
        build_instead(stock, self.runner_class, self.built.add)


def _offer(vit: VitConfig) -> manager.Offer:
    return manager.manager().choose("graft_vit_graph_runners", vit.runner, flag(NAME, "runner"))


def adapt(model: Any, vllm_config: Any) -> None:
    """Give a model that does not speak vLLM's encoder protocol its adapter, if we are asked for.
    Raises `ConfigError` if there is none, or it refuses the model, or the tower is data-parallel;
    where a preset asks, the model is left as it is, and encodes as without us. Raises `HookError`
    if it is not a ``VisionAdapter``."""
    if VitConfig.from_vllm(vllm_config) is None:
        return
    try:
        _adapt(model, vllm_config)
    except GraftError as refused:
        decline_or_raise(NAME, refused, vllm_config)


def _adapt(model: Any, vllm_config: Any) -> None:
    from vllm.model_executor.models.interfaces import supports_encoder_cudagraph

    name = type(model).__name__
    adapter = _adapter_for(name, vllm_config, speaks=supports_encoder_cudagraph(model))
    if adapter is None:
        return
    from vllm_graft.graph_runners.vision.towers.adapter import attach

    if reason := adapter.refuses(model):
        raise ConfigError(_no_graphs(name, reason))
    attach(model, adapter(model, vllm_config))
    info_once(f"vllm-graft splits {name} with {adapter.__module__}.{adapter.__qualname__}")


def _encodes(model_config: Any) -> tuple[str, bool]:
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_encoder_cudagraph

    made, _ = ModelRegistry.resolve_model_cls(model_config.architectures, model_config)
    return made.__name__, supports_encoder_cudagraph(made)


def _adapter_for(model: str, vllm_config: Any, *, speaks: bool) -> Any:
    """The adapter's class for a model that `speaks` the protocol or not; None if it needs none."""
    if speaks:
        return None
    from vllm_graft.graph_runners.vision.towers.adapter import VisionAdapter

    names = [model, *(vllm_config.model_config.architectures or ())]
    offered = [offer.entry.name for offer in manager.manager().offers(_HOOK)]
    name = next((name for name in names if name in offered), None)
    if name is None:
        raise ConfigError(
            f"{flag('vit')} asks for vision graphs, but {names[0]} does not speak vLLM's encoder "
            f"protocol, and no entry of {_HOOK} is named after it (there are: "
            f"{', '.join(sorted(set(offered))) or 'none'}): install a plugin that has one, {_DROP}."
        )
    adapter = manager.manager().choose(_HOOK, name, flag("vit")).entry.resolve()
    if not (isinstance(adapter, type) and issubclass(adapter, VisionAdapter)):
        raise HookError(f"{_HOOK}: {adapter!r} ({name}) must be a subclass of VisionAdapter")
    if reason := _data_parallel(vllm_config):
        raise ConfigError(_no_graphs(names[0], reason))
    return adapter


def _no_graphs(name: str, reason: str) -> str:
    return f"{flag('vit')}: {name} has no vision graphs, as {reason}: {_DROP}."


def _data_parallel(vllm_config: Any) -> str | None:
    """Why an adapter cannot serve a tower whose items vLLM's protocol spreads over ranks."""
    mode = getattr(vllm_config.model_config.multimodal_config, "mm_encoder_tp_mode", None)
    if mode != "data" or (ranks := vllm_config.parallel_config.tensor_parallel_size) == 1:
        return None
    return (
        f"--mm-encoder-tp-mode data spreads images over {ranks} ranks by vLLM's encoder protocol, "
        "which it does not speak (with --mm-encoder-tp-mode weights it has them)"
    )


def _hook_model_state(module: ModuleType) -> None:
    if (state := getattr(module, "ModelState", None)) is None:
        return

    @around(state, "__init__")
    def adapt_first(
        original: Any, self: Any, vllm_config: Any, model: Any, encoder_cache: Any, *args: Any,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        if encoder_cache is not None:
            adapt(model, vllm_config)
        original(self, vllm_config, model, encoder_cache, *args, **kwargs)


def _hook_v1_runner(module: ModuleType) -> None:
    runner = getattr(module, "GPUModelRunner", None)
    if not hasattr(runner, "_create_encoder_cudagraph_manager"):
        return

    @around(runner, "_create_encoder_cudagraph_manager")
    def adapt_first(original: Any, self: Any) -> Any:
        if self.supports_mm_inputs:
            adapt(self.get_model(), self.vllm_config)
        return original(self)


VISION = VisionPart()
