"""How vLLM comes to run our classes, and the proof that it does.

``register()`` installs five things, all inert until a configuration has a ``graft`` key (vision
graphs and graphs of draft models add theirs, see `vit_activation` and `draft_activation`), and
tells vLLM's factory the names of our KV connectors:

1. the platform's ``check_and_update_config`` also parses and checks our key and our connectors'
   keys: in the frontend, and again in the engine core and wherever vLLM derives a configuration;
   and its ``apply_config_platform_defaults``, which comes before vLLM plans its CUDA graphs and
   reads the connectors, refuses what is misspelt, and fills in the numbers of nodes that
   ``tree: auto`` chooses from;
2. ``EagleSpeculator``, asked to build itself, builds the chosen proposer, a subclass of it. The
   class object stays the same, so ``isinstance``, imports by name and subclassing stay right, and
   each construction decides by its own configuration;
3. a worker that has loaded its model checks that what was asked for runs; if it drafts, what it
   says of prompts is cut to their length (`prompt_logprobs`);
4. a scheduler whose configuration has ``tree: auto`` learns how many nodes pay;
5. and the CUDA graphs there are planned for every number of nodes that it may choose;
6. an engine whose scheduler learns asks its workers, once, what they measured of these graphs.

Workers unpickle their configuration and never see (1): hence the others read it themselves. The
modules of (2) to (6) are not imported here but hooked for when they are: ``register()`` also runs
in processes that never need them. All of it survives a fork, where vLLM does not call us again.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm_graft import __version__, draft_activation, prompt_logprobs, vit_activation
from vllm_graft.checks import validate
from vllm_graft.config import EagleConfig, GraftConfig, flag
from vllm_graft.errors import HookError, NotActiveError
from vllm_graft.hicache.checks import parse_connectors, validate_connectors
from vllm_graft.hicache.stamp import stamp
from vllm_graft.hooking import MARK, build_instead, is_hooked, require_speculator, wrap
from vllm_graft.log import info_once, warning_once
from vllm_graft.manager import manager, resolve
from vllm_graft.misplaced import refuse_misplaced
from vllm_graft.post_import import after_import
from vllm_graft.seams import TESTED_VLLM, require_seams, vllm_version
from vllm_graft.spec_decode.policy import auto_schedule

if TYPE_CHECKING:
    from vllm.config import VllmConfig

EXTENSION = "vllm_graft.WorkerExtension"
PLUGIN_NAME = "graft"

_EAGLE_MODULE = "vllm.v1.worker.gpu.spec_decode.eagle.speculator"
_WORKER_MODULE = "vllm.v1.worker.worker_base"
_SCHEDULER_MODULE = "vllm.v1.core.sched.scheduler"
_GRAPHS_MODULE = "vllm.v1.worker.gpu.cudagraph_utils"
_ENGINE_MODULE = "vllm.v1.engine.core"
_CONNECTOR_MODULE = "vllm.distributed.kv_transfer.kv_connector.factory"

_registered = False
_built: set[type[Any]] = set()
"""Proposer classes that ``EagleSpeculator`` has built in this process."""


def install() -> None:
    """Install the hooks; again does nothing more."""
    global _registered
    from vllm.platforms import current_platform

    _hook_platform(type(current_platform))
    after_import(_EAGLE_MODULE, _hook_eagle)
    after_import(_WORKER_MODULE, _hook_worker)
    after_import(_SCHEDULER_MODULE, _hook_scheduler)
    after_import(_GRAPHS_MODULE, _hook_graphs)
    after_import(_ENGINE_MODULE, _hook_engine)
    vit_activation.install()
    draft_activation.install()
    after_import(_CONNECTOR_MODULE, register_connectors)
    _registered = True


def require_registered() -> None:
    """Refuse to be loaded where vLLM has not called ``register()``.

    Raises:
        NotActiveError: says what kept vLLM from calling it.
    """
    if _registered:
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        reason = f"VLLM_PLUGINS={allowed!r} leaves out {PLUGIN_NAME!r}: add it, or unset it"
    else:
        reason = "its entry point is not installed here (run `vllm-graft doctor` on this machine)"
    raise NotActiveError(f"{EXTENSION} was asked for, but vLLM did not load vllm-graft: {reason}.")


def on_config(vllm_config: VllmConfig) -> GraftConfig | None:
    """Parse and check the ``graft`` key of a configuration, and make the workers answer for it.

    Idempotent: vLLM calls it for the same configuration in several processes.

    Raises:
        ConfigError: a wrong key or value, the name of an entry that nobody provides, or an
            unsupported combination.
    """
    refuse_misplaced(vllm_config.additional_config)
    if validate_connectors(vllm_config):
        _extend_worker(vllm_config.parallel_config)
    stamp(vllm_config)
    config = GraftConfig.from_vllm(vllm_config)
    if config is None:
        return None
    validate(config, vllm_config)
    manager().configure(config)
    if config.eagle is not None:
        nodes = vllm_config.speculative_config.num_speculative_tokens
        info_once(f"vllm-graft {__version__}: {_describe(config.eagle, nodes)}")
    if config.vit is not None:
        info_once(f"vllm-graft {__version__}: {vit_activation.on_config(config.vit, vllm_config)}")
    if config.draft is not None:
        said = draft_activation.on_config(config.draft, vllm_config)
        info_once(f"vllm-graft {__version__}: {said}")
    _extend_worker(vllm_config.parallel_config)
    return config


def proposer_class(stock: type[Any], vllm_config: VllmConfig) -> type[Any]:
    """The class to build for ``EagleSpeculator(vllm_config, ...)``: ``stock`` without our key.

    Raises:
        SeamError: if this vLLM is not the one that the tree was written for.
        HookError: if the chosen proposer is not a subclass of ``stock``.
    """
    config = GraftConfig.from_vllm(vllm_config)
    if config is None or config.eagle is None:
        return stock
    require_seams("core", "eagle")
    if not vllm_version().startswith(f"{TESTED_VLLM}."):
        warning_once(
            f"vLLM {vllm_version()} is not a {TESTED_VLLM} that vllm-graft {__version__} was "
            "tested with; every symbol that it touches is as expected"
        )
    manager().configure(config)
    chosen = resolve("graft_proposers", config.eagle.proposer, "eagle", "proposer")
    if not (isinstance(chosen, type) and issubclass(chosen, stock)):
        raise HookError(
            f"{flag('eagle', 'proposer')}={config.eagle.proposer}: {chosen!r} must be a subclass "
            f"of vLLM's {stock.__name__}"
        )
    return chosen


def mend_worker(worker: Any, vllm_config: VllmConfig) -> None:
    """Mend what vLLM gets wrong where drafts are ours."""
    config = GraftConfig.from_vllm(vllm_config)
    if config is not None and (config.eagle is not None or config.draft is not None):
        prompt_logprobs.mend(worker)


def verify_active(worker: Any, vllm_config: VllmConfig) -> None:
    """Check a worker that has loaded its model: does it run what the configuration asks for?

    Raises:
        NotActiveError: names the part, and what runs in its place.
    """
    vit_activation.verify_active(worker, vllm_config)
    draft_activation.verify_active(worker, vllm_config)
    config = GraftConfig.from_vllm(vllm_config)
    if config is None or config.eagle is None:
        return
    require_speculator(worker, _built, "eagle", "tree drafts", "EagleSpeculator")


def on_defaults(vllm_config: VllmConfig) -> None:
    """Refuse what is misspelt before vLLM reads any of it, and fill in what we have defaults for.

    Raises:
        ConfigError: a wrong key or value.
    """
    refuse_misplaced(vllm_config.additional_config)
    parse_connectors(vllm_config)
    set_auto_schedule(vllm_config)


def set_auto_schedule(vllm_config: VllmConfig) -> None:
    """Give ``tree: auto`` its numbers of nodes, unless the user gave some."""
    config = GraftConfig.from_vllm(vllm_config)
    speculative = vllm_config.speculative_config
    if config is None or config.eagle is None or speculative is None:
        return
    if config.eagle.tree == "auto" and speculative.num_speculative_tokens_per_batch_size is None:
        schedule = auto_schedule(
            config.eagle,
            speculative.num_speculative_tokens,
            vllm_config.scheduler_config.max_num_seqs,
        )
        speculative.num_speculative_tokens_per_batch_size = schedule


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

    setattr(hooked, MARK, True)
    setattr(platform, name, classmethod(hooked))


def _hook_eagle(module: ModuleType) -> None:
    build_instead(getattr(module, "EagleSpeculator", None), proposer_class, _note)


def _note(chosen: type[Any]) -> None:
    _built.add(chosen)
    info_once(f"vllm-graft drafts with {chosen.__module__}.{chosen.__qualname__}")


def _hook_worker(module: ModuleType) -> None:
    def verify_first(original: Any) -> Any:
        def initialize_from_config(self: Any, kv_cache_configs: list[Any]) -> None:
            verify_active(self.worker, self.vllm_config)
            mend_worker(self.worker, self.vllm_config)
            original(self, kv_cache_configs)

        return initialize_from_config

    wrap(module.WorkerWrapperBase, "initialize_from_config", verify_first)


def _hook_scheduler(module: ModuleType) -> None:
    def then_tune(original: Any) -> Any:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if GraftConfig.from_vllm(self.vllm_config) is not None:
                from vllm_graft.spec_decode.scheduling import tune

                tune(self)

        return __init__

    wrap(module.Scheduler, "__init__", then_tune)


def _hook_engine(module: ModuleType) -> None:
    def then_seed(original: Any) -> Any:
        def _initialize_effective_attention_block_size(self: Any) -> None:
            original(self)
            if GraftConfig.from_vllm(self.vllm_config) is not None:
                from vllm_graft.spec_decode.scheduling import seed

                seed(self)

        return _initialize_effective_attention_block_size

    # Not __init__: where the engine's process was spawned, that loads us, and runs already.
    wrap(module.EngineCore, "_initialize_effective_attention_block_size", then_seed)


def _hook_graphs(module: ModuleType) -> None:
    def then_plan(original: Any) -> Any:
        def _init_candidates(self: Any) -> None:
            original(self)
            _plan_graphs(self, of_target=isinstance(self, module.ModelCudaGraphManager))

        return _init_candidates

    wrap(module.CudaGraphManager, "_init_candidates", then_plan)


def _plan_graphs(graphs: Any, *, of_target: bool) -> None:
    """Plan the target's graphs for all numbers of nodes that are chosen among, and mixed ones."""
    config = GraftConfig.from_vllm(graphs.vllm_config)
    speculative = graphs.vllm_config.speculative_config
    if config is None or config.eagle is None or speculative is None:
        return
    # Not those of the draft's levels, whose rows are no query of the target.
    if graphs.decode_query_len <= speculative.num_speculative_tokens:
        return
    if config.eagle.tree == "auto":
        from vllm_graft.graph_runners.widths import plan_widths
        from vllm_graft.spec_decode.scheduling import graph_counts

        plan_widths(graphs, graph_counts(graphs.vllm_config))
    # The draft has one layer: in a mixed batch it is launched, as ever.
    if of_target:
        from vllm_graft.graph_runners.mixed import plan_mixed_graphs

        plan_mixed_graphs(graphs, config.eagle.mixed_graphs)


def register_connectors(module: ModuleType) -> None:
    """Make KV connectors of ``graft_kv_connectors`` known to vLLM by their names."""
    factory = module.KVConnectorFactory
    for offer in manager().offers("graft_kv_connectors"):
        name, load = offer.entry.name, offer.entry.load
        if not isinstance(load, str):
            warning_once(f"KV connector {name!r}: load must read 'package.module:Class'")
        elif name not in factory._registry:
            path, _, attribute = load.partition(":")
            factory.register_connector(name, path, attribute)


def _extend_worker(parallel_config: Any) -> None:
    current = parallel_config.worker_extension_cls
    if not current:
        parallel_config.worker_extension_cls = EXTENSION
    elif current != EXTENSION:
        warning_once(
            f"--worker-extension-cls is {current}: collective_rpc('graft_info') is not available "
            f"unless that class inherits from {EXTENSION}"
        )


def _describe(eagle: EagleConfig, nodes: int) -> str:
    """What will draft, and who provides it; refuses a name that nobody provides."""
    plugins = manager()
    chosen = []
    for key, hook in (
        ("proposer", "graft_proposers"),
        ("policy", "graft_tree_policies"),
        ("graph_runner", "graft_draft_graph_runners"),
    ):
        offer = plugins.choose(hook, getattr(eagle, key), flag("eagle", key))
        chosen.append(f"{key} {offer.entry.name} ({offer.provider})")
    most = "up to " if eagle.tree == "auto" else ""
    shape = f"EAGLE trees of {most}{nodes} nodes (topk {eagle.topk}, steps {eagle.steps})"
    return f"{shape}; {', '.join(chosen)}"
