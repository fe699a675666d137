"""Kimi Linear on a CPU: its kernels for GPUs are interpreted, its other operators done in torch."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from tests.support.engines.gpu_engines import exact_engine
from tests.support.engines.recurrent_layers import triton_convolutions
from tests.support.models.kimi_models import write_kimi_linear
from tests.support.models.random_models import VOCABULARY
from tests.support.models.table_drafter import table_trees
from vllm_graft.spec_decode.targets.latent.latent_layer import TreeKimiLatents
from vllm_graft.spec_decode.targets.recurrent.recurrent_kinds import TreeKeyDecays
from vllm_graft.testing import model_runner, spec_metrics

if TYPE_CHECKING:
    import torch


def key_decays_by_token(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    g_bias: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    lower_bound: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``chunk_kda_with_fused_gate``, a token at a time: in float32, which vLLM's chunks lack."""
    import torch
    from torch.nn import functional

    heads, size = k.shape[2:]
    x = raw_g[0].float() + g_bias.float().view(heads, size)
    rates = A_log.float().exp()[:, None]
    if lower_bound is None:
        decays = torch.exp(-rates * functional.softplus(x))
    else:
        decays = torch.exp(lower_bound * torch.sigmoid(rates * x))
    q, k = (
        each[0].float() * torch.rsqrt(each[0].float().square().sum(-1, keepdim=True) + 1e-6)
        for each in (q, k)
    )
    rows, betas = v[0].float(), raw_beta[0].float().sigmoid()
    out, states = torch.zeros_like(v), initial_state.float().clone()
    starts = cu_seqlens.tolist()
    for state, first, last in zip(states, starts, starts[1:]):
        for row in range(first, last):
            state *= decays[row, :, None]
            change = (rows[row] - (state * k[row, :, None]).sum(-1)) * betas[row, :, None]
            state += change[:, :, None] * k[row, :, None]
            out[0, row] = (state * q[row, :, None]).sum(-1) * size**-0.5
    return out, states


@contextlib.contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Let Triton's interpreter run vLLM's kernels of KDA.

    They name exponentials and logarithms when they are imported, before the interpreter puts its
    own in the place of Triton's.
    """
    import triton.language as tl
    from vllm.models.kimi_k3.nvidia.ops.third_party.kda import fused_recurrent

    exp = mock.patch.object(fused_recurrent, "exp", lambda x: tl.exp(x))
    with exp, mock.patch.object(fused_recurrent, "log", lambda x: tl.log(x)):
        yield


@contextlib.contextmanager
def exact_prompts() -> Iterator[None]:
    """Let engines compute prompts through layers with KDA in float32."""
    from vllm.models.kimi_k3.nvidia.ops.third_party import kda

    with mock.patch.object(kda, "chunk_kda_with_fused_gate", key_decays_by_token):
        yield


def _write(
    latent: torch.Tensor, rope: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store latents and the keys that heads share at their slots; -1 is padding. Capturable."""
    import torch

    rows = torch.cat([latent, rope.flatten(1)], dim=-1).to(kv_cache.dtype)
    blocks, size = slots.clamp(min=0) // kv_cache.shape[1], kv_cache.shape[1]
    # Padding leaves slot 0, of the null block, as it is.
    places = blocks, slots.clamp(min=0) % size
    kv_cache[places] = torch.where(slots[:, None] >= 0, rows, kv_cache[places])


def _keys(nope: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    import torch

    shared = rope.reshape(len(rope), 1, -1).expand(-1, nope.shape[1], -1)
    return torch.cat([nope, shared.to(nope.dtype)], dim=-1)


def _prompt_keys(
    q: torch.Tensor,
    nope: torch.Tensor,
    rope: torch.Tensor,
    latent: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *_: Any,
) -> torch.Tensor:
    """Stands for ``fused_mla_key_concat_kv_cache_insert``, without rotations."""
    _write(latent, rope, kv_cache, slots)
    return _keys(nope, rope)


def _absorbed_queries(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Stands for ``fused_mla_decode_q_concat_kv_cache_insert``, without rotations."""
    import torch

    _write(latent, rope, kv_cache, slots)
    return torch.cat([query, query_rope], dim=-1)


def _first_states(
    states: torch.Tensor, blocks: torch.Tensor, has_state: torch.Tensor
) -> torch.Tensor:
    """Stands for ``gather_initial_states``, whose kernel refuses tensors of a CPU."""
    return states[blocks.long()] * has_state.view(-1, 1, 1, 1)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Let engines on a CPU serve Kimi Linear as a GPU does, and count as one that can."""
    from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn as layers
    from vllm.models.kimi_k3.nvidia import mla

    from vllm_graft.spec_decode.targets.recurrent import recurrent_features

    stock = mla.MultiHeadLatentAttention.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        # It is read after it was loaded; a CPU's products keep a packed copy alone.
        self.kv_b_proj._cpu_skip_gemm_dispatch = True

    mends = (
        (mla.MultiHeadLatentAttention, "__init__", __init__),
        (layers, "causal_conv1d_update", triton_convolutions().causal_conv1d_update),
        (layers, "gather_initial_states", _first_states),
        (mla, "fused_mla_key_concat_kv_cache_insert", _prompt_keys),
        (mla, "fused_mla_decode_q_concat_kv_cache_insert", _absorbed_queries),
        (mla, "fused_mla_kv_concat", _keys),
        (recurrent_features, "_on_nvidia", lambda: True),
    )
    with contextlib.ExitStack() as patches:
        # A kernel that joins a product with its reduction over ranks, for GPUs alone.
        patches.enter_context(mock.patch.dict("os.environ", VLLM_KIMI_K3_GEMM_AR="0"))
        for owner, name, value in mends:
            patches.enter_context(mock.patch.object(owner, name, value))
        patches.enter_context(interpreted_kernels())
        patches.enter_context(exact_prompts())
        yield


HIDDEN, NODES, TOKENS = 512, 7, 24
NEAR = 0.5
"""Largest gap of log-probabilities that rounding to bfloat16 explains."""

_RANDOM = random.Random(0)


def prompt_of(length: int) -> list[int]:
    return [_RANDOM.randrange(2, VOCABULARY) for _ in range(length)]


PROMPTS = [prompt_of(_RANDOM.choice([1, 3, 17, 40, 90, 300])) for _ in range(32)]
"""More than run at once, so that prompts meet trees; some are longer than a step's tokens."""


def write_target(folder: Path) -> str:
    """A target whose heads have the size of the published model's."""
    return str(write_kimi_linear(folder, heads=16, head=128, hidden=HIDDEN, dtype="bfloat16"))


@contextmanager
def engine(
    target: str,
    backend: str,
    *,
    trees: bool,
    draft: Path | None = None,
    graphs: str = "FULL_DECODE_ONLY",
    form: str = "auto",
    **options: Any,
) -> Iterator[Any]:
    """An engine without drafts, or with trees from the table, as n-grams or a head's would be."""
    given: dict[str, Any] = {"gdn_prefill_backend": "triton"}
    if trees:
        options |= table_trees(draft, recurrent=True, recurrent_form=form)
        given |= options.pop("additional_config")
        if draft:
            # Else the draft would get the target's backend, which has no plain attention.
            options["speculative_config"]["attention_backend"] = "TRITON_ATTN"
    usual: dict[str, Any] = {
        "dtype": "bfloat16", "attention_backend": backend, "additional_config": given,
        "skip_tokenizer_init": True, "max_model_len": 8192, "max_num_batched_tokens": 256,
        "enable_prefix_caching": False, "kv_cache_memory_bytes": 2**31,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        # A kernel for several Blackwell GPUs, whose module wants CUTLASS wherever it runs.
        patch.setenv("VLLM_KIMI_K3_GEMM_AR", "0")
        # As vLLM sets it for this model; the test takes it back.
        patch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
        with exact_engine(
            target, drafts=NODES, graphs=graphs, exact=False, **usual | options
        ) as llm:
            yield llm


def check_parts(llm: Any, form: str = "inputs") -> None:
    """Trees ran, in graphs and beside prompts, on two layers of each kind, in this form."""
    runner = model_runner(llm)
    layers = runner.vllm_config.compilation_config.static_forward_context.values()
    found = [getattr(layer, name, None) for layer in layers for name in ("_forward", "_attention")]
    ours = [getattr(each, "__wrapped__", each) for each in found]
    assert sum(isinstance(each, TreeKeyDecays) for each in ours) == 2
    assert sum(isinstance(each, TreeKimiLatents) for each in ours) == 2
    assert bool(runner.speculator.context.kept_bytes) is (form == "inputs")
    counters = runner.speculator.context.counters
    print(f"counters: {counters}, {spec_metrics(llm)}")
    assert counters.tree_replays > 0
    assert counters.mixed_launches + counters.mixed_replays > 0
