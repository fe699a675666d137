"""A model as vLLM builds it on one rank, without memory: bytes of its weights, and K/V specs.
vLLM's own classes make the layers, with the quantization of the configuration, on PyTorch's device
``meta``. Groups of ranks are stood in for, as nothing is sent."""

import contextlib
import copy
import math
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

_SHARED = ("embed_tokens", "lm_head", "shared_head")
"""Parts that a draft's module shares with the target where they have the same shape."""


_ONLINE = {"Mxfp4": 4 + 8 / 32, "Nvfp4": 4 + 8 / 16, "Mxfp8": 8 + 8 / 32, "Fp8": 8, "Int8": 8}
"""Bits of a weight with its scale that vLLM quantizes on loading, by the prefix of the class."""


class Built(NamedTuple):
    """What a rank holds of a model: shape and bytes by parameter, vLLM's K/V specs by layer."""

    weights: dict[str, tuple[tuple[int, ...], int]]
    specs: dict[str, Any]

    def num_bytes(self, target: "Built | None" = None) -> int:
        """Bytes of the weights, without what a draft shares with its target."""
        there = target.weights if target is not None else {}
        heads = {shape for name, (shape, _) in there.items() if _is_shared(name)}
        return sum(
            size
            for name, (shape, size) in self.weights.items()
            if not (_is_shared(name) and shape in heads)
        )


def _is_shared(name: str) -> bool:
    return any(part in name for part in _SHARED)


def build(model: Any, vllm_config: Any) -> Built:
    """Build a model of a ``ModelConfig``, the target's or the draft's, for the first rank. vLLM
    writes the size of blocks into the configuration's ``cache_config``, and layers into its
    ``compilation_config``. What its classes raise is raised."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding, sparse_attn_indexer
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype

    whole = _of_draft_model(model, vllm_config)
    layers: dict[str, Any] = {}
    whole.compilation_config.static_forward_context = layers
    with (
        _ranks(whole.parallel_config),
        # Nothing runs, and to prepare it takes most of the time.
        mock.patch.object(torch, "compile", lambda made=None, **_: made or (lambda each: each)),
        # An engine of this process must find none that is on meta.
        mock.patch.dict(rotary_embedding._ROPE_DICT, clear=True),
        # These libraries come with vLLM for GPUs, and may not be here.
        mock.patch.object(sparse_attn_indexer, "has_deep_gemm", return_value=True),
        mock.patch.dict(os.environ, VLLM_USE_FLASHINFER_SAMPLER="0"),
        set_default_torch_dtype(model.dtype),
        set_current_vllm_config(whole),
        _on_meta(),
    ):
        made = initialize_model(whole, model_config=model)
        if model is vllm_config.model_config:
            # As an executor does, once it has loaded the target.
            current_platform.update_block_size_for_backend(whole)
        specs = {
            name: layer.get_kv_cache_spec(whole)
            for name, layer in layers.items()
            if isinstance(layer, AttentionLayerBase)
            and getattr(layer, "kv_sharing_target_layer_name", None) is None
        }
    weights = {name: (tuple(each.shape), each.nbytes) for name, each in made.named_parameters()}
    return Built(
        weights | dict(_quantized(made, weights)),
        {name: spec for name, spec in specs.items() if spec is not None},
    )


def _quantized(
    model: Any, weights: dict[str, tuple[tuple[int, ...], int]]
) -> Iterator[tuple[str, tuple[tuple[int, ...], int]]]:
    """Yield the weights that vLLM quantizes while it loads, which are built as they are read."""
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        kind = type(method).__name__.lstrip("_")
        bits = next((bits for name, bits in _ONLINE.items() if kind.startswith(name)), None)
        if bits is None or not getattr(method, "uses_meta_device", False):
            continue
        for name in ("weight", "w13_weight", "w2_weight"):
            if (held := weights.get(f"{path}.{name}")) is not None:
                yield f"{path}.{name}", (held[0], int(math.prod(held[0]) * bits / 8))


def _of_draft_model(model: Any, vllm_config: Any) -> Any:
    """The configuration that a model is built with: a standalone draft has one of its own."""
    speculative = vllm_config.speculative_config
    if model is vllm_config.model_config or speculative.method != "draft_model":
        return vllm_config
    whole = copy.copy(vllm_config)
    whole.model_config, whole.parallel_config = model, speculative.draft_parallel_config
    whole.quant_config = whole._get_quantization_config(model, whole.load_config)
    return whole


def _on_meta() -> Any:
    """Make everything on ``meta``, also what asks for another device, but for maps of experts."""
    import torch
    from torch.overrides import TorchFunctionMode

    whole = (torch.int32, torch.int64)

    class OnMeta(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            if function in (torch.full, torch.arange) and kwargs.get("dtype") in whole:
                kwargs["device"] = "cpu"  # Their elements are looked for.
            elif kwargs.get("device") is not None:
                kwargs["device"] = "meta"
            try:
                return function(*args, **kwargs)
            except RuntimeError:  # Of two devices, as positions and their frequencies.
                return function(*(_to_meta(each) for each in args), **kwargs)

    stack = contextlib.ExitStack()
    stack.enter_context(torch.device("meta"))
    stack.enter_context(OnMeta())
    return stack


def _to_meta(value: Any) -> Any:
    import torch

    return value.to("meta") if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def _ranks(parallel: Any) -> Iterator[None]:
    """Stand in for vLLM's groups, as the first rank sees them."""
    from vllm.distributed import parallel_state

    tensor, pipeline = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    replicas, prefill = parallel.data_parallel_size, parallel.prefill_context_parallel_size
    sizes = {
        "_WORLD": tensor * pipeline,
        "_TP": tensor,
        "_PP": pipeline,
        "_DP": replicas,
        "_PCP": prefill,
        "_DCP": parallel.decode_context_parallel_size,
        "_EP": tensor * replicas * prefill,
    }
    with contextlib.ExitStack() as stack:
        for name, size in sizes.items():
            stack.enter_context(mock.patch.object(parallel_state, name, _group(size)))
        yield


def _group(size: int) -> Any:
    group = SimpleNamespace(size=lambda: size, rank=lambda: 0)
    return SimpleNamespace(
        world_size=size, rank=0, rank_in_group=0, local_rank=0, is_first_rank=True,
        is_last_rank=size == 1, ranks=list(range(size)), device_group=group, cpu_group=group,
        device_communicator=None,
    )  # fmt: skip
