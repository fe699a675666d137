"""Compiled by test_page_kernel.py."""

from __future__ import annotations

from vllm_graft.hicache.page_kernel import WORDS
from vllm_graft.testing.kernels import KernelCase

CASES = [
    KernelCase(
        "copy",
        "vllm_graft.hicache.page_kernel:_copy_kernel",
        {"table": "*i64", "total": "i32", "begin": "i32", "end": "i32"},
        {"WORDS": WORDS},
        {"num_warps": 8},
    )
]
