"""Calls of the fused kernels of vision encoders."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from vllm_graft.graph_runners.vision.fused.norm_kernel import add_layer_norm, add_rms_norm
from vllm_graft.graph_runners.vision.fused.pointwise_kernels import rotate_qk, silu_mul

bf16 = partial(torch.empty, dtype=torch.bfloat16, device="meta")


def calls() -> Iterator[Callable[[], object]]:
    for residual in (None, bf16(16, 1280)):
        x, weight = bf16(16, 1280), bf16(1280)
        yield partial(add_layer_norm, x, residual, weight, weight, 1e-6)
        yield partial(add_rms_norm, x, residual, weight, 1e-6, True)
        narrow = None if residual is None else bf16(16, 1152)
        yield partial(add_layer_norm, bf16(16, 1152), narrow, bf16(1152), bf16(1152), 1e-6)
    for size in (72, 80):
        halves = bf16(16, size // 2)
        yield partial(rotate_qk, bf16(16, 3 * 16 * size), halves, halves, 16)
    yield partial(silu_mul, bf16(16, 2 * 3420))
