"""More of what the rule for sm_90 on takes, to compile it without a GPU; it takes minutes."""

import torch

from tests.support.kernel_cases.attention_kernels import attention_cases
from tests.support.kernel_cases.plan_kernels import chosen_cases
from vllm_graft.spec_decode.kernels.attention.attention_plan import Plan, Tile
from vllm_graft.spec_decode.kernels.attention.e4m3 import HALVES, PRODUCTS, Native
from vllm_graft.testing.compiling import KernelCase

CASES: list[KernelCase] = [
    *chosen_cases(64, 32, 1, fp8=True, window=128),
    *chosen_cases(128, 8, 1, fp8=True),
    *chosen_cases(128, 4, 16),
    *chosen_cases(128, 4, 64, fp8=True),
    *chosen_cases(128, 32, 64),
    *chosen_cases(128, 8, 4, draft=True),
    *chosen_cases(128, 4, 16, draft=True),
    *chosen_cases(256, 32, 1, fp8=True),
    *chosen_cases(256, 8, 1),
    *chosen_cases(512, 32, 16, fp8=True),
    *chosen_cases(512, 8, 4),
    *chosen_cases(64, 32, 1, fp8=True, window=128, native=Native(PRODUCTS, 128, 128)),
    *chosen_cases(64, 8, 1, fp8=True, native=Native(HALVES)),
    *chosen_cases(128, 8, 16, fp8=True, draft=True, native=Native(HALVES)),
    *chosen_cases(128, 8, 1, fp8=True, draft=True, native=Native(PRODUCTS)),
    *chosen_cases(128, 64, 1, fp8=True, native=Native(PRODUCTS, 128)),
    *chosen_cases(128, 16, 4, fp8=True, native=Native(HALVES, 64, 128)),
    *chosen_cases(256, 64, 1, fp8=True, native=Native(HALVES, 128)),
    *chosen_cases(256, 16, 1, fp8=True, native=Native(PRODUCTS, 64)),
    # No rule takes partial results of fewer bits, which a search times.
    *attention_cases(
        "bf16", 256, 32, draft=False, fp8=False, window=1024,
        plan=Plan(Tile(64, 32, 8, 3), 4, ahead=True, partials=torch.bfloat16, overlapped=True),
    ),
]  # fmt: skip
