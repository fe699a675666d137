"""The one place where parts put themselves over vLLM's ``ModelState``.

Model Runner V2 asks the model for its ModelState class first (``get_model_state_cls``), then
decides by itself. A part calls :func:`compose` between the two, while the model is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_graft.base.errors import GraftError

if TYPE_CHECKING:
    import torch.nn as nn
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.model_states.interface import ModelState


def compose(target_model: nn.Module, vllm_config: VllmConfig, mixin: type[Any]) -> type[ModelState]:
    """Stack ``mixin`` over the ModelState class that vLLM would use for ``target_model``.

    The new class is ``(mixin, resolved class)``: hooks that the mixin overrides must call
    ``super()``. Parts stack in the order of their calls, the last one outermost. Only this
    model instance is changed.

    Raises:
        GraftError: if ``mixin`` is already part of the model's class.
    """
    from vllm.v1.worker.gpu.model_states import resolve_model_state_cls

    base = resolve_model_state_cls(vllm_config, target_model)
    if issubclass(base, mixin):
        raise GraftError(f"{mixin.__name__} is already part of {base.__name__}; compose it once")
    composed: type[ModelState] = type(f"{mixin.__name__}Over{base.__name__}", (mixin, base), {})
    target_model.get_model_state_cls = lambda: composed
    return composed
