"""Plans of tree attention that no rule takes yet, to compile them without a GPU, from sm_90 on."""

from __future__ import annotations

import torch

from vllm_graft.spec_decode.kernels.attention.attention_plan import Plan
from vllm_graft.spec_decode.kernels.attention.tile import Tile
from vllm_graft.testing.compiling import KernelCase
from vllm_graft.testing.kernel_cases.attention_kernels import attention_cases

_ALL = {"ahead": True, "skip_empty": True, "overlapped": True}

CASES: list[KernelCase] = [
    *attention_cases(
        "bf16", 128, 8, draft=False, fp8=False,
        plan=Plan(Tile(32, 64, 4, 3), partials=torch.float16, combine_warps=2, **_ALL),
    ),
    *attention_cases(
        "bf16", 256, 32, draft=False, fp8=False, window=1024,
        plan=Plan(Tile(64, 32, 8, 3), partials=torch.bfloat16, combine_warps=1, **_ALL),
    ),
    *attention_cases(
        "bf16", 512, 16, draft=False, fp8=True,
        plan=Plan(Tile(64, 32, 8, 2), combine_width=128, **_ALL),
    ),
    *attention_cases(
        "bf16", 128, 8, draft=True, fp8=False, plan=Plan(Tile(32, 64, 4, 3), **_ALL)
    ),
]  # fmt: skip
"""Programmatic dependent launch does not compile for less than sm_90."""
