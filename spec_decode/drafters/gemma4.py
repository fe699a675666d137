"""Trees from the assistant that comes with a Gemma 4, which has no K/V of its own."""

from torch import nn
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.worker.gpu.spec_decode.gemma4.speculator import Gemma4Speculator

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.options import flag
from vllm_graft.spec_decode.drafters.target_dependent import TargetDependentTrees


class Gemma4Trees(TargetDependentTrees, Gemma4Speculator):
    """What vLLM builds in the place of `Gemma4Speculator`. The assistant's layers have queries
    alone, and read K/V of the target's last layers. It drafts all tokens from the position of the
    last accepted one. So a node differs from its siblings by its token and by the state of its
    parent, and a level leaves no K/V for the levels below it."""

    seams = ("gemma4",)
    has_window = False

    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        """Load the assistant, and let its layers read those of the target, as vLLM does. Raises
        `ConfigError` if it would draft chains on a CPU. The target's layers stay vLLM's there,
        whose K/V lie otherwise than a draft of ours reads them."""
        model: nn.Module = super().load_draft_model(target_model, target_attn_layer_names)
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        backends = {layers[name].get_attn_backend().get_name() for name in target_attn_layer_names}
        if self.trees.shape.topk == 1 and "CPU_ATTN" in backends:
            raise ConfigError(
                f"{flag('tree', 'topk')} is 1, but the attention backend CPU_ATTN keeps K/V of a "
                "chain's target as Gemma 4's assistant can't read them: set it to 2 or more"
            )
        return model
