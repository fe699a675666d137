"""Cases of the page kernel, which test_fp8_copy.py compiles."""

from typing import Any

import triton.language as tl

from vllm_graft.hicache.copies.fp8_kernel import ELEMENTS
from vllm_graft.hicache.copies.page_kernel import WORDS
from vllm_graft.testing.compiling import KernelCase

SIGNATURE = {"table": "*i64", "total": "i32", "begin": "i32", "end": "i32"}


def _convert(dtype: Any, store: bool, aligned: bool) -> KernelCase:
    way = "store" if store else "load"
    return KernelCase(
        f"{way} {dtype}{' aligned' if aligned else ''}",
        "vllm_graft.hicache.copies.fp8_kernel:_convert_kernel",
        SIGNATURE,
        {"DTYPE": dtype, "STORE": store, "ALIGNED": aligned, "ELEMENTS": ELEMENTS},
        {"num_warps": 8},
    )


CASES = [
    KernelCase(
        "copy",
        "vllm_graft.hicache.copies.page_kernel:_copy_kernel",
        SIGNATURE,
        {"WORDS": WORDS},
        {"num_warps": 8},
    ),
    *(
        _convert(dtype, store, aligned)
        for dtype in (tl.bfloat16, tl.float16, tl.float32)
        for store in (True, False)
        for aligned in (True, False)
        if aligned or dtype is tl.bfloat16
    ),
]
