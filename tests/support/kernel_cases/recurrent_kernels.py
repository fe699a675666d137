"""Specialisations of the kernels of recurrent layers, for the test of a CPU machine."""

from typing import Any

from vllm_graft.spec_decode.targets.recurrent.kernels.gates import Decay, numbers_of, tile_of
from vllm_graft.testing.compiling import KernelCase, argument_types

_KERNELS = "vllm_graft.spec_decode.targets.recurrent.kernels"


def _conv_case(dtype: str) -> KernelCase:
    return KernelCase(
        name=f"tree convolution {dtype}",
        function=f"{_KERNELS}.convolution:_tree_conv_kernel",
        signature=argument_types(
            {
                f"*{dtype}": "inputs weights bias windows outputs",
                "*i32": "columns num_accepted query_start_loc parents",
                "i32": "dim input_stride weight_stride block_stride token_stride feature_stride "
                "column_stride output_stride",
            }
        ),
        constexprs={"WIDTH": 4, "HAS_BIAS": True, "SILU": True, "FEATURES": 256, "ROWS": 16},
        options={"num_warps": 4},
    )


_STRIDES = "row_stride decay_stride beta_stride block_stride column_stride output_stride"
_SIZES = {
    Decay.SCALAR: {"GROUPS": 16, "HEADS": 32, "KEY": 128, "VALUE": 128},
    Decay.BY_KEY: {"GROUPS": 32, "HEADS": 32, "KEY": 128, "VALUE": 128},
    Decay.SELECTIVE: {"GROUPS": 8, "HEADS": 64, "KEY": 128, "VALUE": 64},
}


def _rows_case(
    decay: Decay, dtype: str, state: str, *, chunk: int = 0, bounded: bool = False
) -> KernelCase:
    """A kernel over the rows of trees."""
    selective, sizes = decay is Decay.SELECTIVE, _SIZES[decay]
    values, warps = tile_of(decay, sizes["VALUE"])
    given = {
        "*i32": "columns num_accepted query_start_loc parents",
        "*fp32": "rates",
        "fp32": "scale lower_bound",
        "i32": _STRIDES,
    }
    of_rows = f"rows outputs decays {'skips' if selective else 'betas'}"
    own: dict[str, Any] = {"VALUES": values, "KEYS": sizes["KEY"]}
    kept: dict[str, str] = {}
    if chunk:
        kept = {"gates": "*fp32", "masks": "*i64"}
        own = {"VALUES": 32, "PART": 32, "ROWS": chunk, "NUMBERS": numbers_of(decay, sizes["KEY"])}
        warps = 8 if chunk > 32 else 4
    what = f"chunk rows={chunk}" if chunk else "recurrence"
    kernel = "chunk:_tree_chunk_kernel" if chunk else "recurrence:_tree_recurrence_kernel"
    return KernelCase(
        name=f"tree {what} {decay.name} {dtype} states={state} bounded={bounded}",
        function=f"{_KERNELS}.{kernel}",
        signature=argument_types(given)
        | argument_types({f"*{dtype}": of_rows})
        | kept
        | {"states": f"*{state}", "bias": "*fp32" if decay is Decay.BY_KEY else f"*{dtype}"},
        constexprs={**sizes, **own, "DECAY": int(decay), "BOUNDED": bounded}
        | {"betas" if selective else "skips": None},
        options={"num_warps": warps},
    )


def _keep_case() -> KernelCase:
    return KernelCase(
        name="keep rows",
        function=f"{_KERNELS}.recurrent_rows:_keep_rows_kernel",
        signature=argument_types(
            {
                "*i32": "query_start_loc num_accepted parents firsts accepted",
                "*i64": "batch_rows masks",
            }
        ),
        constexprs={"ROWS": 64},
        options={"num_warps": 1},
    )


def _fold_case(dtype: str, state: str, decay: Decay, *, by_prefix: bool) -> KernelCase:
    import triton.language as tl

    kinds = {"bf16": tl.bfloat16, "fp32": tl.float32}
    by_key = decay is Decay.BY_KEY
    values, warps = tile_of(decay, 128)
    return KernelCase(
        name=f"fold states {dtype} states={state} by_prefix={by_prefix} {decay.name}",
        function=f"{_KERNELS}.state_folds:_fold_states_kernel",
        signature=argument_types(
            {
                "*i64": "layers tables",
                "*i32": "firsts accepted query_start_loc path num_sampled seq_lens",
                "i32": "path_stride row_stride",
            }
        ),
        constexprs={
            "STATE": kinds[state],
            "ROW": kinds[dtype],
            "RATE": None if by_key else tl.float32,
            "BIAS": None if by_key else kinds[dtype],
            "ALIGNED_BYTES": 16,
            "ALIGNED_UNITS": 4 if state == "fp32" else 8,
            "GROUPS": 32 if by_key else 16,
            "HEADS": 32,
            "KEY": 128,
            "VALUE": 128,
            "KEYS": 128,
            "VALUES": values,
            "BY_PREFIX": by_prefix,
            "DECAY": int(decay),
            "NUMBERS": numbers_of(decay, 128),
        },
        options={"num_warps": warps},
    )


_MOVES = {"*i64": "tables", "*i32": "path num_sampled num_drafts seq_lens", "i32": "path_stride"}


def _move_cases(unit: str, size: int, by_prefix: bool) -> list[KernelCase]:
    import triton.language as tl

    dtype = getattr(tl, unit)
    shared = {"UNIT": dtype, "UNIT_BYTES": size, "BY_PREFIX": by_prefix}
    # Where layers keep no inputs, nothing is passed over.
    kept = ("query_start_loc", "firsts")
    given = argument_types({"*i32": " ".join(kept)}) if by_prefix else {}
    none = {} if by_prefix else dict.fromkeys(kept)
    return [
        KernelCase(
            name=f"move states {unit} by_prefix={by_prefix}",
            function=f"{_KERNELS}.state_moves:_move_states_kernel",
            signature=argument_types({"*i64": "bases", "i32": "units"})
            | argument_types(_MOVES)
            | given,
            constexprs={**shared, **none, "CHUNK": 4096},
            options={"num_warps": 8},
        ),
        KernelCase(
            name=f"move windows {unit} by_prefix={by_prefix}",
            function=f"{_KERNELS}.state_moves:_move_windows_kernel",
            signature=argument_types({"*i64": "layouts"}) | argument_types(_MOVES),
            constexprs={**shared, "FEATURES": 256},
            options={"num_warps": 4},
        ),
    ]


# The dtypes are those of published models.
CASES: list[KernelCase] = [
    *(_conv_case(dtype) for dtype in ("bf16", "fp32")),
    _rows_case(Decay.SCALAR, "bf16", "fp32"),
    _rows_case(Decay.SCALAR, "bf16", "bf16"),
    _rows_case(Decay.BY_KEY, "bf16", "fp32"),
    _rows_case(Decay.BY_KEY, "fp32", "fp32"),
    _rows_case(Decay.SELECTIVE, "bf16", "fp32"),
    _keep_case(),
    *(_rows_case(Decay.SCALAR, "bf16", "fp32", chunk=rows) for rows in (16, 64)),
    _rows_case(Decay.SCALAR, "fp32", "fp32", chunk=64),
    *(_rows_case(Decay.BY_KEY, "bf16", "fp32", chunk=rows) for rows in (16, 64)),
    _rows_case(Decay.BY_KEY, "fp32", "fp32", chunk=64, bounded=True),
    _fold_case("bf16", "fp32", Decay.SCALAR, by_prefix=True),
    _fold_case("fp32", "bf16", Decay.SCALAR, by_prefix=False),
    _fold_case("bf16", "fp32", Decay.BY_KEY, by_prefix=True),
    _fold_case("bf16", "fp32", Decay.SELECTIVE, by_prefix=False),
    *(_rows_case(Decay.SELECTIVE, "bf16", "fp32", chunk=rows) for rows in (16, 64)),
    *_move_cases("int64", 8, by_prefix=True),
    *_move_cases("int16", 2, by_prefix=False),
]
