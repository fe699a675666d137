"""Specialisations of tree attention, to compile it without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_graft.spec_decode.kernels.sizes import cdiv, next_power_of_2
from vllm_graft.testing.compiling import KernelCase, argument_types

if TYPE_CHECKING:
    from vllm_graft.spec_decode.kernels.attention.attention_plan import Plan, Tile

_KERNELS = "vllm_graft.spec_decode.kernels.attention.attention_kernel"

_STRIDES = (
    "query_row_stride query_head_stride out_row_stride out_head_stride cache_block_stride "
    "cache_head_stride cache_slot_stride table_stride scratch_req_stride scratch_slot_stride "
    "scratch_head_stride ancestors_stride"
)


_TREE = "query_start_loc num_rows"
"""Arguments that tell a request's rows in a tree; a level has the same number for all."""


def attention_cases(
    dtype: str,
    head: int,
    rows: int,
    draft: bool,
    fp8: bool,
    crowded: bool = True,
    window: int = 0,
    chunked: bool = False,
    plan: Plan | None = None,
    native: int = 0,
) -> list[KernelCase]:
    """Cases of the kernel of splits and of the one that combines them."""
    from vllm_graft.spec_decode.kernels.attention.attention_plan import Plan
    from vllm_graft.spec_decode.kernels.attention.e4m3 import PACKED, PLAIN

    group, heads = 4, 8
    splitting = plan is None or plan.splits > 1
    if plan is None:
        plan = Plan(_splitting_tile(dtype, head, rows * group, crowded))
    tile = plan.tile
    label = f"{dtype} head={head} rows={rows} draft={draft} fp8={fp8} crowded={crowded}"
    label += f" window={window} chunked={chunked} native={native}"
    if plan != Plan(tile):
        label += f" {plan}"
    absent = _absent(draft, window, native)
    shared = {
        "HEADS": heads,
        "HEAD": head,
        "PARTIAL_ROWS": rows,
        "DRAFT": draft,
        "TOPK": rows if draft else 1,
        "OVERLAPPED": plan.overlapped and splitting,
    }
    splits = {
        "HEAD_PAD": next_power_of_2(head),
        "GROUP": group,
        "BLOCK_SIZE": 16,
        "TILES": cdiv(rows * group, tile.rows),
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys,
        "FP8": native or ((PLAIN if dtype == "fp32" else PACKED) if fp8 else 0),
        "HAS_CAP": True,
        "WINDOW": window,
        "CHUNKED": chunked,
        "SPLIT": splitting,
        "PRECISION": "ieee" if dtype == "fp32" else "tf32",
        "AHEAD": plan.ahead,
        "EDGES": plan.edges,
        "SKIP_EMPTY": plan.skip_empty and splitting,
    }
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    types = _split_types(dtype, plan, fp8, native)
    found = [_case("split", label, types, absent, shared | splits, options)]
    if splitting:
        types = _combine_types(dtype, plan)
        absent += [] if plan.skip_empty else ["kv_lens"]
        parts = shared | _combine_constants(plan, head, draft, window, chunked)
        options = {"num_warps": plan.combine_warps}
        if plan.overlapped:
            options["launch_pdl"] = True
        found.append(_case("combine", label, types, absent, parts, options))
    return found


def _case(
    kernel: str,
    label: str,
    types: dict[str, str],
    absent: list[str],
    constexprs: dict[str, Any],
    options: dict[str, Any],
) -> KernelCase:
    """A case without the arguments that are absent."""
    return KernelCase(
        name=f"{kernel} {label}",
        function=f"{_KERNELS}:{kernel}_kernel",
        signature={name: kind for name, kind in types.items() if name not in absent},
        constexprs={**{name: None for name in absent if name in types}, **constexprs},
        options=options,
    )


def _splitting_tile(dtype: str, head: int, rows: int, crowded: bool) -> Tile:
    import torch

    from vllm_graft.spec_decode.kernels.attention.attention_plan import Tile

    torch_type = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    return Tile.choose(rows, next_power_of_2(head), torch_type, crowded=crowded, split=True)


def _absent(draft: bool, window: int, native: int) -> list[str]:
    """Arguments that are not given."""
    found = [*_TREE.split(), "row_masks", "row_depths"] if draft else ["scratch", "ancestors"]
    if not window:
        found.append("sinks")
    if not native:
        found.append("q_scale")
    return found


def _partial_types(plan: Plan) -> dict[str, str]:
    """Types of what splits leave to the kernel that combines them."""
    import torch

    kinds = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
    types = argument_types({"*fp32": "partial_acc partial_peak partial_total"})
    return types | {"partial_acc": f"*{kinds[plan.partials]}"}


def _split_types(dtype: str, plan: Plan, fp8: bool, native: int) -> dict[str, str]:
    types = _partial_types(plan) | argument_types(
        {
            "*fp32": "q_scale k_scale v_scale",
            "*i32": f"kv_lens block_table ancestors row_depths {_TREE}",
            "*i64": "row_masks",
            "fp32": "scale soft_cap",
            "i32": f"level num_splits {_STRIDES}",
        }
    )
    # Not above, where it may be the same key.
    types |= argument_types({f"*{dtype}": "query out scratch kv_cache sinks"})
    if fp8:
        types["kv_cache"] = "*fp8e4nv" if native else "*u8"
    if native:
        types["query"] = "*fp8e4nv"
    return types


def _combine_types(dtype: str, plan: Plan) -> dict[str, str]:
    return _partial_types(plan) | argument_types(
        {
            "*i32": f"kv_lens {_TREE}",
            "i32": "num_parts level out_row_stride out_head_stride",
            f"*{dtype}": "out",
        }
    )


def _combine_constants(
    plan: Plan, head: int, draft: bool, window: int, chunked: bool
) -> dict[str, Any]:
    head_pad = next_power_of_2(head)
    return {
        "WIDTH": min(plan.combine_width or head_pad, head_pad),
        "PARTS_PAD": next_power_of_2(plan.splits + draft) if plan.splits > 1 else 32,
        "BLOCK_N": plan.tile.keys if plan.skip_empty else 1,
        "WINDOW": window if plan.skip_empty else 0,
        "CHUNKED": chunked and plan.skip_empty,
    }
