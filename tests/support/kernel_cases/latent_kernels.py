"""Specialisations of the kernels over latents (MLA), for the compile-only test of a CPU machine."""

from vllm_graft.spec_decode.kernels.sizes import cdiv, next_power_of_2
from vllm_graft.testing.compiling import KernelCase, argument_types

_KERNELS = "vllm_graft.spec_decode.targets.latent"


def _latent_case(
    dtype: str, heads: int, rows: int, fp8: bool, mixed: bool = False, draft: bool = False
) -> KernelCase:
    import torch

    from vllm_graft.spec_decode.kernels.attention.e4m3 import PACKED
    from vllm_graft.spec_decode.targets.latent.latent_attention import latent_tile

    torch_type = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    rank, rope = 512, 64
    two_dtypes = fp8 and draft
    tile = latent_tile(rows * heads, rank, torch_type, mixed=mixed, two_dtypes=two_dtypes)
    strides = (
        "query_row_stride query_head_stride rope_row_stride rope_head_stride out_row_stride "
        "out_head_stride cache_block_stride cache_slot_stride table_stride scratch_req_stride "
        "scratch_slot_stride ancestors_stride"
    )
    tree, level = ["query_start_loc", "num_rows", "row_masks"], ["scratch", "ancestors"]
    absent = [*(tree if draft else level), *([] if fp8 else ["k_scale"])]
    signature = argument_types(
        {
            f"*{dtype}": "query query_rope latents out scratch",
            "*fp32": "partial_acc partial_peak partial_total k_scale",
            "*i32": "query_start_loc num_rows prefix_lens block_table ancestors",
            "*i64": "row_masks",
            "fp32": "scale",
            "i32": f"level num_splits {strides}",
        }
    )
    if fp8:
        signature["latents"] = "*u8"
    return KernelCase(
        name=f"latent {dtype} heads={heads} rows={rows} fp8={fp8} mixed={mixed} draft={draft}",
        function=f"{_KERNELS}.latent_kernel:latent_kernel",
        signature={name: kind for name, kind in signature.items() if name not in absent},
        constexprs={
            **dict.fromkeys(absent),
            "HEADS": heads,
            "RANK": rank,
            "RANK_PAD": rank,
            "ROPE": rope,
            "ROPE_PAD": rope,
            "BLOCK_SIZE": 64,
            "PARTIAL_ROWS": rows,
            "TILES": cdiv(rows * heads, tile.rows),
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.keys,
            "DRAFT": draft,
            "TOPK": rows if draft else 1,
            "FP8": PACKED if fp8 else 0,
            "SPLIT": True,
            "PRECISION": "tf32",
        },
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )


def _latent_combine_case(heads: int, rows: int, draft: bool = False) -> KernelCase:
    types = {
        "*fp32": "partial_acc partial_peak partial_total",
        "*i32": "query_start_loc num_rows",
        "*bf16": "out",
        "i32": "num_parts level out_row_stride out_head_stride",
    }
    absent = ["query_start_loc", "num_rows"] if draft else []
    return KernelCase(
        name=f"combine of latents heads={heads} rows={rows} draft={draft}",
        function="vllm_graft.spec_decode.kernels.attention.attention_kernel:combine_kernel",
        signature={
            name: kind for name, kind in argument_types(types).items() if name not in absent
        },
        constexprs={
            **dict.fromkeys(absent),
            "kv_lens": None,
            "HEADS": heads,
            "HEAD": 512,
            "WIDTH": 512,
            "PARTIAL_ROWS": rows,
            "PARTS_PAD": 64,
            "DRAFT": draft,
            "TOPK": rows if draft else 1,
            "BLOCK_N": 1,
            "WINDOW": 0,
            "CHUNKED": False,
            "OVERLAPPED": False,
        },
        options={"num_warps": 8},
    )


def _copy_rows_case(width: int) -> KernelCase:
    types = {
        "*bf16": "source target",
        "*i32": "query_start_loc num_rows",
        "i32": "source_stride target_stride",
    }
    return KernelCase(
        name=f"copy rows width={width}",
        function=f"{_KERNELS}.latent_kernel:copy_rows_kernel",
        signature=argument_types(types),
        constexprs={"WIDTH": width, "MAX_ROWS": 64, "BLOCK": 1024},
        options={"num_warps": 4},
    )


def _own_latents_case(dtype: str, heads: int, rows: int, num_reqs: int = 1) -> KernelCase:
    from vllm_graft.spec_decode.targets.latent.own_latents import own_tile

    tile = own_tile(num_reqs, rows * heads, 512)
    strides = (
        "query_row_stride query_head_stride rope_row_stride rope_head_stride prefix_row_stride "
        "prefix_head_stride lse_head_stride lse_row_stride out_row_stride out_head_stride "
        "cache_block_stride cache_slot_stride table_stride"
    )
    return KernelCase(
        name=f"own latents {dtype} heads={heads} rows={rows} requests={num_reqs}",
        function=f"{_KERNELS}.own_latents:own_latents_kernel",
        signature=argument_types(
            {
                f"*{dtype}": "query query_rope latents prefix_out out",
                "*fp32": "prefix_lse",
                "*i32": "query_start_loc prefix_lens block_table num_rows",
                "*i64": "row_masks",
                "fp32": "scale",
                "i32": f"num_reqs num_pairs {strides}",
            }
        ),
        constexprs={
            "HEADS": heads,
            "RANK": 512,
            "ROPE": 64,
            "ROPE_PAD": 64,
            "BLOCK_SIZE": 64,
            "MAX_ROWS": rows,
            "BLOCK_M": tile.rows,
            "BLOCK_N": max(16, next_power_of_2(rows)),
            "CHUNK": tile.chunk,
            "STAGES": tile.stages,
            "PRECISION": "tf32",
        },
        options={"num_warps": tile.warps, "num_stages": 1},
    )


LATENT_CASES = [
    _latent_case("bf16", heads=16, rows=32, fp8=False),
    _latent_case("bf16", heads=128, rows=64, fp8=True),
    _latent_case("fp16", heads=16, rows=8, fp8=False, mixed=True),
    _latent_case("bf16", heads=16, rows=8, fp8=False, draft=True),
    _latent_case("bf16", heads=128, rows=8, fp8=True, draft=True),
    _latent_case("fp16", heads=64, rows=1, fp8=False, draft=True),
    _latent_combine_case(heads=128, rows=64),
    _latent_combine_case(heads=16, rows=8, draft=True),
    _copy_rows_case(width=2048),
    _own_latents_case("bf16", heads=16, rows=32),
    _own_latents_case("bf16", heads=16, rows=32, num_reqs=16),
    _own_latents_case("bf16", heads=128, rows=64, num_reqs=4),
    _own_latents_case("fp16", heads=1, rows=4),
]
