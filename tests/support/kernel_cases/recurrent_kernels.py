"""Specialisations of the kernels of recurrent layers, for the test of a CPU machine."""

from __future__ import annotations

from typing import Any

from vllm_graft.spec_decode.kernels.recurrence.state_folds import TILES, Rule
from vllm_graft.testing.compiling import KernelCase, argument_types

_KERNELS = "vllm_graft.spec_decode.kernels.recurrence"


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


_DELTA_STRIDES = "row_stride decay_stride beta_stride block_stride column_stride output_stride"
_SELECTIVE_STRIDES = "row_stride step_stride block_stride column_stride output_stride"
_DELTA_SIZES = {"KEY_HEADS": 16, "VALUE_HEADS": 32, "KEY": 128, "VALUE": 128, "VALUES": 32}
_SELECTIVE_SIZES = {"HEADS": 64, "GROUPS": 8, "VALUE": 64, "STATE": 128, "VALUES": 32}


def _rows_case(
    what: str,
    function: str,
    dtype: str,
    state: str,
    types: dict[str, str],
    constexprs: dict[str, Any],
    *,
    chunk: int = 0,
    parents: bool = False,
    warps: int = 4,
) -> KernelCase:
    """A kernel over the rows of trees.

    Args:
        what: what it computes.
        function: where it is, below the package of these kernels.
        dtype: of rows; ``T`` stands for it in `types`.
        state: dtype of states.
        types: of arguments that other such kernels have not.
        constexprs: sizes.
        chunk: rows of a chunk; 0 for a kernel that takes one row after another.
        parents: whether a chunk is told the rows' parents, too.
        warps: of a program.
    """
    rows = f" rows={chunk}" if chunk else ""
    own = {"*i32": "parents"} if parents or not chunk else {}
    own |= {"*fp32": "gates", "*i64": "masks"} if chunk else {}
    return KernelCase(
        name=f"{what} {dtype} states={state}{rows}",
        function=f"{_KERNELS}.{function}",
        signature={"states": f"*{state}", "rows": f"*{dtype}", "outputs": f"*{dtype}"}
        | argument_types({"*i32": "columns num_accepted query_start_loc"})
        | argument_types({f"*{dtype}": types["*T"]})
        | argument_types({kind: names for kind, names in types.items() if kind != "*T"})
        | argument_types(own),
        constexprs=constexprs | ({"PART": 32, "ROWS": chunk} if chunk else {}),
        options={"num_warps": 8 if chunk > 32 else warps},
    )


_DELTA_TYPES = {
    "*T": "decays betas decay_bias",
    "*fp32": "log_rates",
    "fp32": "scale",
    "i32": _DELTA_STRIDES,
}
_SELECTIVE_TYPES = {"*T": "steps step_bias skips", "*fp32": "rates", "i32": _SELECTIVE_STRIDES}


def _delta_rule_case(dtype: str, state: str) -> KernelCase:
    function = "delta_rule:_tree_delta_rule_kernel"
    sizes = _DELTA_SIZES | {"KEYS": 128}
    return _rows_case("tree delta rule", function, dtype, state, _DELTA_TYPES, sizes)


_KEY_DECAY_TYPES = {
    "*T": "decays betas",
    "*fp32": "log_rates decay_bias",
    "fp32": "scale lower_bound",
    "i32": _DELTA_STRIDES,
}
_KEY_DECAY_SIZES = {"HEADS": 32, "KEY": 128, "VALUE": 128}


def _key_decays_case(dtype: str, state: str) -> KernelCase:
    function = "key_decays:_tree_key_decays_kernel"
    sizes = _KEY_DECAY_SIZES | {"KEYS": 128, "VALUES": 8, "BOUNDED": False}
    return _rows_case("tree key decays", function, dtype, state, _KEY_DECAY_TYPES, sizes, warps=1)


def _key_decay_chunk_case(dtype: str, rows: int, *, bounded: bool) -> KernelCase:
    return _rows_case(
        f"tree key decay chunk bounded={bounded}",
        "key_decay_chunk:_tree_key_decay_chunk_kernel",
        dtype,
        "fp32",
        _KEY_DECAY_TYPES,
        _KEY_DECAY_SIZES | {"VALUES": 32, "BOUNDED": bounded},
        chunk=rows,
        parents=True,
    )


def _selective_case(dtype: str, state: str) -> KernelCase:
    function = "selective_state:_tree_selective_kernel"
    sizes = _SELECTIVE_SIZES | {"STATES": 128}
    return _rows_case("tree selective update", function, dtype, state, _SELECTIVE_TYPES, sizes)


def _chunk_case(dtype: str, state: str, rows: int) -> KernelCase:
    function = "delta_chunk:_tree_delta_chunk_kernel"
    return _rows_case(
        "tree delta chunk", function, dtype, state, _DELTA_TYPES, _DELTA_SIZES, chunk=rows
    )


def _selective_chunk_case(dtype: str, state: str, rows: int) -> KernelCase:
    function = "selective_chunk:_tree_selective_chunk_kernel"
    return _rows_case(
        "tree selective chunk",
        function,
        dtype,
        state,
        _SELECTIVE_TYPES,
        _SELECTIVE_SIZES,
        chunk=rows,
    )


def _keep_case() -> KernelCase:
    return KernelCase(
        name="keep rows",
        function=f"{_KERNELS}.kept_rows:_keep_rows_kernel",
        signature=argument_types(
            {
                "*i32": "query_start_loc num_accepted parents firsts accepted",
                "*i64": "batch_rows masks",
            }
        ),
        constexprs={"ROWS": 64},
        options={"num_warps": 1},
    )


def _fold_case(dtype: str, state: str, rule: Rule, *, by_prefix: bool) -> KernelCase:
    import triton.language as tl

    kinds = {"bf16": tl.bfloat16, "fp32": tl.float32}
    by_key = rule is Rule.KEY_DECAYS
    values, warps = TILES[rule]
    return KernelCase(
        name=f"fold states {dtype} states={state} by_prefix={by_prefix} {rule.value}",
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
            "SELECTIVE": rule is Rule.SELECTIVE,
            "BY_KEY": by_key,
        },
        options={"num_warps": warps},
    )


_MOVES = {
    "*i64": "tables",
    "*i32": "path num_sampled num_drafts seq_lens",
    "i32": "path_stride",
}


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
    _delta_rule_case("bf16", "fp32"),
    _delta_rule_case("bf16", "bf16"),
    _key_decays_case("bf16", "fp32"),
    _key_decays_case("fp32", "fp32"),
    _selective_case("bf16", "fp32"),
    _keep_case(),
    *(_chunk_case("bf16", "fp32", rows) for rows in (16, 64)),
    _chunk_case("fp32", "fp32", 64),
    *(_key_decay_chunk_case("bf16", rows, bounded=False) for rows in (16, 64)),
    _key_decay_chunk_case("fp32", 64, bounded=True),
    _fold_case("bf16", "fp32", Rule.DELTA, by_prefix=True),
    _fold_case("fp32", "bf16", Rule.DELTA, by_prefix=False),
    _fold_case("bf16", "fp32", Rule.KEY_DECAYS, by_prefix=True),
    _fold_case("bf16", "fp32", Rule.SELECTIVE, by_prefix=False),
    *(_selective_chunk_case("bf16", "fp32", rows) for rows in (16, 64)),
    *_move_cases("int64", 8, by_prefix=True),
    *_move_cases("int16", 2, by_prefix=False),
]
