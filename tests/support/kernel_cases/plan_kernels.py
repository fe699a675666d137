"""Tree attention as the rule for sm_90 on computes it, to compile it without a GPU."""

from typing import Any

import torch

from tests.support.kernel_cases.attention_kernels import attention_cases
from vllm_graft.spec_decode.kernels.attention.attention_plan import Sizes, choose_plan
from vllm_graft.spec_decode.kernels.attention.e4m3 import HALVES, PRODUCTS, Native
from vllm_graft.testing.compiling import KernelCase

_GROUP = 4
"""Heads that share K/V in these cases."""


def chosen_cases(
    head: int,
    rows: int,
    num_reqs: int,
    *,
    fp8: bool = False,
    draft: bool = False,
    window: int = 0,
    native: Native | None = None,
) -> list[KernelCase]:
    """Cases of what the rule chooses for 8 heads of K/V on an H200."""
    sizes = Sizes(
        rows=rows * _GROUP,
        head=head,
        dtype=torch.bfloat16,
        num_reqs=num_reqs,
        kv_heads=8,
        keys=window + rows if window else 32768,
        window=window > 0,
        draft=draft,
        most_splits=64,
        multiprocessors=132,
        capability=(9, 0),
        native=native,
    )
    kinds: dict[str, Any] = {"draft": draft, "fp8": fp8, "window": window}
    if native:
        kinds["native"] = native.form
    return attention_cases("bf16", head, rows, plan=choose_plan(sizes), **kinds)


CASES: list[KernelCase] = [
    *chosen_cases(128, 8, 16),
    *chosen_cases(128, 32, 1, fp8=True),
    *chosen_cases(128, 32, 1, fp8=True, native=Native(HALVES, 128)),
    *chosen_cases(128, 8, 4, fp8=True, native=Native(PRODUCTS)),
    *chosen_cases(256, 32, 16, window=1024),
    *chosen_cases(512, 32, 1),
]
"""Programmatic dependent launch does not compile for less than sm_90."""
