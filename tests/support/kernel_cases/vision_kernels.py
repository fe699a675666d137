"""Specialisations of the fused kernels that must compile, for the test of a CPU machine."""

from typing import Any

from vllm_graft.graph_runners.vision.fused.norm_kernel import NO_FUSION, THREADS
from vllm_graft.graph_runners.vision.fused.pointwise_kernels import BLOCK
from vllm_graft.testing.compiling import KernelCase

_PACKAGE = "vllm_graft.graph_runners.vision.fused"


def _pointers(names: str) -> dict[str, str]:
    return dict.fromkeys((f"{name}_ptr" for name in names.split()), "*bf16")


def _norm_case(kind: str, width: int, residual: bool) -> KernelCase:
    rms = kind == "rms"
    pointers = _pointers("x weight sum out" if rms else "x weight bias sum out")
    constexprs: dict[str, Any] = {"WIDTH": width}
    constexprs |= {"ROUND": True} if rms else {"THREADS": THREADS}
    if residual:
        pointers |= _pointers("residual")
    else:
        constexprs |= {"residual_ptr": None}
    numbers = {"eps": "fp32", **({"share": "fp32"} if rms else {})}
    return KernelCase(
        name=f"{kind} norm of {width}, residual {residual}",
        function=f"{_PACKAGE}.norm_kernel:_{kind}_norm_kernel",
        signature={**pointers, **numbers},
        constexprs=constexprs,
        options={"num_warps": 1 if rms else THREADS // 32, **NO_FUSION},
    )


def _rotate_case(heads: int, size: int) -> KernelCase:
    return KernelCase(
        name=f"rotate {heads} heads of {size}",
        function=f"{_PACKAGE}.pointwise_kernels:_rotate_kernel",
        signature={**_pointers("qkv cos sin out"), "rows": "i32", "qkv_stride": "i32"},
        constexprs={"HEADS": heads, "SIZE": size, "HEADS_PAD": 16, "HALF_PAD": 64},
        options={"num_warps": 4},
    )


CASES = [
    *(_norm_case("layer", width, residual) for width in (1152, 1280) for residual in (False, True)),
    *(_norm_case("rms", 1280, residual) for residual in (False, True)),
    *(_rotate_case(16, size) for size in (72, 80)),
    KernelCase(
        name="gate",
        function=f"{_PACKAGE}.pointwise_kernels:_silu_mul_kernel",
        signature=_pointers("x out"),
        constexprs={"WIDTH": 3420, "BLOCK": BLOCK},
        options={"num_warps": 4},
    ),
]
