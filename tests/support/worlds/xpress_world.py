"""What vLLM 0.33 has for XPress drafts, under 0.32: a speculator and a model of ours."""

import importlib.util
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.references.block_reference import RefinerHead

_MODULE = "vllm.v1.worker.gpu.spec_decode.xpress"
_NAMES = {"mlp.gate_proj": "mlp_gate", "mlp.up_proj": "mlp_up", "mlp.down_proj": "mlp_down"}
"""Names of the checkpoint that are other attributes of the refiner."""


@contextmanager
def xpress_world() -> Iterator[None]:
    """Let this process build XPress drafts, where vLLM doesn't know them itself."""
    if importlib.util.find_spec(_MODULE) is not None:
        yield
        return
    from vllm.model_executor.models import ModelRegistry

    for name in ("Qwen3XPressModel", "DFlashQwen3XPressModel"):
        ModelRegistry.register_model(name, _draft_class())
    package, module = ModuleType(_MODULE), ModuleType(f"{_MODULE}.speculator")
    module.XPressSpeculator = _speculator_class()  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, _MODULE, package)
        patch.setitem(sys.modules, f"{_MODULE}.speculator", module)
        yield


def _speculator_class() -> type[Any]:
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
    from vllm.v1.worker.gpu.spec_decode.dspark.utils import load_dspark_model

    class XPressSpeculator(DFlashSpeculator):
        """Loads its draft as DSpark's speculator does; its chain is not needed here."""

        def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
            return load_dspark_model(target_model, self.vllm_config)

    return XPressSpeculator


def _draft_class() -> type[Any]:
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model

    class Backbone(DFlashQwen3Model):
        def __init__(self, *, vllm_config: Any, start_layer_id: int = 0, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, start_layer_id=start_layer_id, prefix=prefix)
            config = self.config
            self.xpress_head = RefinerHead(
                config.vocab_size,
                config.hidden_size,
                config.xpress_block_size,
                config.xpress_rank,
                config.xpress_mlp_hidden,
                config.xpress_topc,
            )

    class XPressDraft(DFlashQwen3ForCausalLM):
        """The model of an XPress draft."""

        model_cls = Backbone

        def compute_draft_logits(self, states: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.logits_processor(self.lm_head, states)
            return logits

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            rest = []
            head: Any = self.model.xpress_head
            for name, weight in weights:
                kind, _, own = name.partition("xpress_head.")
                if kind or not own:
                    rest.append((name, weight))
                elif own == "mix.L":
                    head.fold(weight)
                else:
                    layer = own.removesuffix(".weight")
                    getattr(head, _NAMES.get(layer, layer)).weight.data.copy_(weight)
            loaded: None = super().load_weights(rest)
            return loaded

    return XPressDraft
