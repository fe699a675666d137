"""How vLLM comes to capture the loop of a draft model; part of `activation`, which calls this.

``StandaloneARSpeculator``, asked to build itself, builds our subclass of it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from vllm_graft.base.log import info_once
from vllm_graft.config import DraftConfig, GraftConfig, flag
from vllm_graft.hooks.manager import manager
from vllm_graft.seams.compare import require_seams
from vllm_graft.seams.post_import import after_import
from vllm_graft.seams.wrap import build_instead, require_speculator

_MODULE = "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator"

_built: set[type[Any]] = set()
"""Classes that ``StandaloneARSpeculator`` has built in this process in its own place."""


def install() -> None:
    """Wait for vLLM's module; again does nothing more."""
    after_import(_MODULE, _hook_speculator)


def on_config(draft: DraftConfig, vllm_config: Any) -> str:
    """Say which runner will capture the loop; refuses a name that nobody provides."""
    offer = manager().choose(
        "graft_draft_graph_runners", draft.graph_runner, flag("draft", "graph_runner")
    )
    steps = vllm_config.speculative_config.num_speculative_tokens
    chosen = f"graph_runner {offer.entry.name} ({offer.provider})"
    return f"graphs of a draft model's chain of {steps}; {chosen}"


def speculator_class(stock: type[Any], vllm_config: Any) -> type[Any]:
    """The class to build for ``StandaloneARSpeculator(...)``: ``stock`` without our key.

    Raises:
        SeamError: if this vLLM is not the one that the graphs were written for.
    """
    if _config(vllm_config) is None:
        return stock
    # The graph runner's symbols stand under the part that had it first.
    require_seams("core", "eagle", "draft")
    from vllm_graft.spec_decode.drafters.chain import ChainSpeculator

    return ChainSpeculator


def verify_active(worker: Any, vllm_config: Any) -> None:
    """Check a worker that has loaded its model.

    Raises:
        NotActiveError: says what drafts in our place.
    """
    if _config(vllm_config) is None:
        return
    require_speculator(
        worker, _built, "draft", "CUDA graphs of the draft's loop", "StandaloneARSpeculator"
    )


def _config(vllm_config: Any) -> DraftConfig | None:
    config = GraftConfig.from_vllm(vllm_config)
    return None if config is None else config.draft


def _hook_speculator(module: ModuleType) -> None:
    build_instead(getattr(module, "StandaloneARSpeculator", None), speculator_class, _note)


def _note(chosen: type[Any]) -> None:
    _built.add(chosen)
    info_once(f"vllm-graft drafts with {chosen.__module__}.{chosen.__qualname__}")
