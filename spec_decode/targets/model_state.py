"""Tree decoding's part of the engine's model state: before, around and after a target pass."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.targets.families import ServedLayers, TargetState
from vllm_graft.spec_decode.verification.context import TreeContext
from vllm_graft.spec_decode.verification.sampler import TreeRejectionSampler, follow_paths


def samples_by_temperature(params: SamplingParams | None) -> bool:
    """Whether temperature is all that changes a request's logits before a token is drawn. A grammar
    changes them before vLLM's sampler sees them, so it does not count."""
    if (
        params is None
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.bad_words
        or params.thinking_token_budget is not None
        or params.logit_bias
        or params.allowed_token_ids
        or params.min_tokens
    ):
        return False
    # A top_k of 0 or -1 means none. A greedy request's tokens are never filtered.
    filtered = params.top_k > 0 or params.top_p != 1.0 or params.min_p != 0.0
    return params.temperature == 0.0 or not filtered


class TreeModelState:
    """Mixed into the model state class that vLLM resolves for the target."""

    graft: TreeContext
    layers: ServedLayers
    target_states: Sequence[TargetState] = ()
    # Attributes of vLLM's ModelState.
    vllm_config: VllmConfig
    device: torch.device

    @classmethod
    def bind(cls, context: TreeContext, layers: ServedLayers) -> type[Self]:
        """Return a subclass whose class attributes belong to one engine."""
        return type("TreeModelState", (cls,), {"graft": context, "layers": layers})

    def custom_sampler(self, sampler: Sampler) -> tuple[Sampler, TreeRejectionSampler]:
        """Verify trees with vLLM's own sampler, whose state has the requests' texts."""
        # The frontend refuses processors of the command line; these come from entry points.
        for processor in sampler.logits_processors:
            if not type(processor).__module__.startswith("vllm."):
                raise ConfigError(
                    f"--additional-config.graft.tree: the logits processor "
                    f"{type(processor).__module__}.{type(processor).__qualname__} may read a "
                    f"chain's history: uninstall its plugin, or remove the graft.tree keys"
                )
        for watch in self.graft.watches:
            watch.attach(sampler.req_states)
        config = self.vllm_config.speculative_config
        assert config is not None
        # In a chain the rows before a row are its path.
        if self.graft.shape.topk > 1:
            follow_paths(sampler, self.graft.tree)
        return sampler, TreeRejectionSampler(sampler, config, self.device, self.graft)

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> None:
        """Make the families' states of the target. vLLM calls this again for every new cache."""
        super().initialize_kv_cache(kv_cache_config, block_tables)  # type: ignore[misc]
        layers = self.vllm_config.compilation_config.static_forward_context
        self.target_states = self.layers.states(layers, kv_cache_config, block_tables)
        states = self.target_states
        self.graft.reads_rows = any(getattr(state, "reads_rows", True) for state in states)

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        super().add_request(req_index, new_req_data)  # type: ignore[misc]
        params = new_req_data.sampling_params
        self.graft.by_temperature[req_index] = samples_by_temperature(params)
        for watch in self.graft.watches:
            watch.begin(req_index, new_req_data)

    def preprocess_state(
        self,
        input_batch: InputBatch,
        block_tables: tuple[torch.Tensor, ...],
        kv_cache_config: KVCacheConfig,
        num_computed_tokens: torch.Tensor,
    ) -> None:
        """Give the drafts their depths as positions and their ancestors as masks."""
        super().preprocess_state(  # type: ignore[misc]
            input_batch, block_tables, kv_cache_config, num_computed_tokens
        )
        has_rope_state = getattr(self, "rope_state", None) is not None
        step = self.graft.begin(input_batch, num_computed_tokens, keep_shift=has_rope_state)
        for state in self.target_states:
            state.fork(step)

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        """Carry the depths over to multi-dimensional positions."""
        inputs: dict[str, Any] = super().prepare_inputs(  # type: ignore[misc]
            input_batch, req_states
        )
        step = self.graft.step
        if step is not None and step.batch is input_batch and step.depth_shift is not None:
            # In text after an image all dimensions have the same coordinate, which rises by one
            # per token. So the shift is the same in each.
            inputs["positions"] += step.depth_shift
        return inputs

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        *args: Any,
        for_capture: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Choose, on the host, which requests the tree kernel computes."""
        is_graph = cudagraph_mode is CUDAGraphMode.FULL
        self.graft.choose_mode(input_batch, for_capture, is_graph=is_graph)
        return super().prepare_attn(  # type: ignore[misc, no-any-return]
            input_batch, cudagraph_mode, *args, for_capture=for_capture, **kwargs
        )

    def postprocess_state(
        self,
        idx_mapping: torch.Tensor,
        num_sampled: torch.Tensor,
        num_computed_tokens: torch.Tensor | None = None,
    ) -> None:
        """Leave what the layers cache as a chain of the accepted tokens would have left it."""
        step = self.graft.step
        if step is not None and step.num_sampled is not None:
            # First: vLLM may keep copies of the accepted rows' states, for prefix caching.
            for state in self.target_states:
                state.commit(self.graft.path, step)
        super().postprocess_state(  # type: ignore[misc]
            idx_mapping, num_sampled, num_computed_tokens
        )
        self.graft.saves.release()
