"""Specialisations of every kernel that must compile, for the compile-only test of a CPU machine."""

from typing import Any

from tests.support.kernel_cases.attention_kernels import attention_cases
from tests.support.kernel_cases.latent_kernels import LATENT_CASES
from tests.support.kernel_cases.ngram_kernels import HISTORY_CASES, NGRAM_CASES
from vllm_graft.spec_decode.kernels.sizes import (
    cdiv,
    moved_block,
    next_power_of_2,
    rank_block,
    topk_block,
    topk_merge_warps,
)
from vllm_graft.testing.compiling import KernelCase, argument_types

_KERNELS = "vllm_graft.spec_decode.kernels"


def _expand_cases(topk: int, steps: int) -> list[KernelCase]:
    width = topk + (steps - 1) * topk * topk
    pad = next_power_of_2(topk)
    table = {
        "*fp32": "scores frontier_scores",
        "*i64": "tokens",
        "*i32": "parents frontier_candidates ancestors next_tokens",
        "i32": "logp_stride token_stride",
    }
    shape = {"WIDTH": width, "STEPS": steps, "TOPK": topk, "TOPK_PAD": pad}
    seed = KernelCase(
        name=f"seed topk={topk}",
        function=f"{_KERNELS}.expand:_seed_kernel",
        signature={"logp": "*fp32", "root_tokens": "*i64", **argument_types(table)},
        constexprs={**shape, "HAS_NEXT": True},
        options={"num_warps": 1},
    )
    children = {"child_logp": "*fp32", "child_tokens": "*i64", "parent_rows": "*i64"}
    strides = {"logp_node_stride": "i32", "token_node_stride": "i32"}
    expand = KernelCase(
        name=f"expand topk={topk}",
        function=f"{_KERNELS}.expand:_expand_kernel",
        signature={**children, **strides, "level": "i32", **argument_types(table)},
        constexprs={
            **shape,
            "STEPS_PAD": next_power_of_2(steps),
            "CHILDREN_PAD": next_power_of_2(topk * topk),
        },
        options={"num_warps": 1 if topk <= 8 else 4},
    )
    return [seed, expand]


def _finish_cases(topk: int, steps: int, nodes: int, extra: int = 0) -> list[KernelCase]:
    candidates = topk + (steps - 1) * topk * topk
    signature = argument_types(
        {
            "*i64": "tokens idx_mapping tree_masks draft_tokens",
            "*i32": "best parents tree_parents tree_depths",
            "i32": "tree_stride draft_stride",
        }
    )
    absent: dict[str, Any] = {"of_memory": None} | ({} if extra else {"extra_nodes": None})
    nodes_pad, width = next_power_of_2(nodes + 1), candidates + extra
    block, others = rank_block(width)
    added = f" extra={extra}" if extra else ""
    rank = KernelCase(
        name=f"rank topk={topk} steps={steps} nodes={nodes}{added}",
        function=f"{_KERNELS}.finish:_rank_kernel",
        signature={"scores": "*fp32", "chosen": "*i32"},
        constexprs={
            "WIDTH": width,
            "CANDIDATES": width,
            "NODES": nodes,
            "NODES_PAD": nodes_pad,
            "BLOCK": block,
            "OTHERS": others,
        },
    )
    finish = KernelCase(
        name=f"finish topk={topk} steps={steps} nodes={nodes}{added}",
        function=f"{_KERNELS}.finish:_finish_kernel",
        signature=signature | ({"extra_nodes": "*i64"} if extra else {}),
        constexprs={
            **absent,
            "WIDTH": width,
            "DRAFTED": candidates,
            "NODES": nodes,
            "NODES_PAD": nodes_pad,
            "ROUNDS": min(nodes, steps + extra).bit_length(),
            "HAS_EXTRA": extra > 0,
            "PATHS": 0,
            "SLOTS": 0,
        },
    )
    return [rank, finish]


def _step_cases() -> list[KernelCase]:
    rows = {
        "*i32": "tree_depths query_start_loc cu_num_logits num_computed num_drafts num_rows "
        "prefix_lens plain_lens row_depths row_parents tree_parents",
        "*i64": "tree_masks idx_mapping positions row_masks",
        "i32": "num_reqs max_rows tree_stride",
    }
    walk = {
        "*i64": "target_tokens draft_tokens idx_mapping positions sampled extra_nodes extra_counts",
        "*i32": "cu_num_logits tree_parents prefill_len path num_sampled emitted teaches",
        "i32": "tree_stride sampled_width sampled_stride path_stride",
    }
    gather = {
        "*i32": "path num_sampled query_start_loc num_draft_tokens ids moved_ids",
        "*i64": "positions moved_positions",
        "*bf16": "states moved_states",
        "i32": "num_reqs num_tokens path_stride states_stride moved_stride",
    }
    rows_moved, columns = moved_block(4096)
    return [
        KernelCase(
            name="rows",
            function=f"{_KERNELS}.rows:_rows_kernel",
            signature=argument_types(rows),
            constexprs={"PLAIN_ROWS": True, "ROWS_PAD": 64},
            options={"num_warps": 1},
        ),
        KernelCase(
            name="walk",
            function=f"{_KERNELS}.walk:_walk_kernel",
            signature=argument_types(walk),
            constexprs={
                "HAS_PREFILL": True,
                "COUNTED": True,
                "EXTRAS": 2,
                "SLOTS": 256,
                "SOME_TEACH": True,
                "WIDTH_PAD": 64,
            },
            options={"num_warps": 1},
        ),
        KernelCase(
            name="follow path",
            function=f"{_KERNELS}.compact:_follow_kernel",
            signature=argument_types(gather),
            constexprs={"WIDTH": 4096, "REQS_PAD": 256, "ROWS": rows_moved, "COLUMNS": columns},
            options={"num_warps": 4},
        ),
    ]


def _compact_case(unit: int) -> KernelCase:
    import triton.language as tl

    types = {
        "*i64": "bases layouts slot_mappings",
        "*i32": "path num_sampled query_start_loc num_draft_tokens",
        "i32": "path_stride slot_stride",
    }
    return KernelCase(
        name=f"compact unit={unit}",
        function=f"{_KERNELS}.compact:_compact_kernel",
        signature=argument_types(types),
        constexprs={"UNIT": {8: tl.int64, 2: tl.int16}[unit], "WIDTH_PAD": 64},
        options={"num_warps": 1, "num_stages": 1},
    )


def _scratch_case(dtype: str, key: int, value: int) -> KernelCase:
    strides = "key_row_stride key_head_stride value_row_stride value_head_stride"
    scratch = "scratch_req_stride scratch_slot_stride scratch_head_stride"
    return KernelCase(
        name=f"scratch {dtype} key={key} value={value}",
        function=f"{_KERNELS}.attention.tree_attention:_scratch_kernel",
        signature=argument_types(
            {f"*{dtype}": "key value scratch", "i32": f"level {strides} {scratch}"}
        ),
        constexprs={
            "TOPK": 8,
            "KEY": key,
            "KEY_PAD": next_power_of_2(key),
            "VALUE": value,
            "VALUE_PAD": next_power_of_2(value),
        },
        options={"num_warps": 1},
    )


def _windowed_table_case(extend: bool) -> KernelCase:
    starts = "query_start_loc" if extend else ""
    sizes = "window table_stride table_blocks out_stride out_width"
    return KernelCase(
        name=f"windowed table {'extend' if extend else 'levels'}",
        function=f"{_KERNELS}.attention.windowed_table:_window_kernel",
        signature=argument_types(
            {"*i32": f"table kv_lens {starts} out_table out_lens", "i32": sizes}
        ),
        constexprs={
            "BLOCK_SIZE": 16,
            "SINK": 1,
            "PIECE": 128,
            **({} if extend else {"query_start_loc": None}),
        },
        options={"num_warps": 1},
    )


def _own_rows_case(dtype: str, head: int, rows: int, fp8: bool, sinks: bool = False) -> KernelCase:
    from vllm_graft.spec_decode.kernels.attention.e4m3 import PACKED

    group = 4
    strides = (
        "query_row_stride query_head_stride prefix_row_stride prefix_head_stride lse_head_stride "
        "lse_row_stride out_row_stride out_head_stride cache_block_stride cache_head_stride "
        "cache_slot_stride table_stride"
    )
    signature = argument_types(
        {
            f"*{dtype}": "query kv_cache prefix_out out",
            "*fp32": "prefix_lse k_scale v_scale",
            "*i32": "query_start_loc seq_lens block_table num_rows",
            "*i64": "row_masks",
            "fp32": "scale soft_cap",
            "i32": strides,
        }
    )
    if fp8:
        # FlashAttention's output beside an fp8 cache is bf16.
        signature |= argument_types(
            {"*u8": "query kv_cache", "*bf16": "prefix_out", "*fp32": "q_scale"}
        )
    if sinks:
        signature["sinks"] = f"*{dtype}"
    return KernelCase(
        name=f"own rows {dtype} head={head} rows={rows} fp8={fp8} sinks={sinks}",
        function=f"{_KERNELS}.attention.own_rows:own_rows_kernel",
        signature=signature,
        constexprs={
            **({} if fp8 else {"q_scale": None}),
            **({} if sinks else {"sinks": None}),
            "GROUP": group,
            "HEAD": head,
            "HEAD_PAD": next_power_of_2(head),
            "BLOCK_SIZE": 16,
            "MAX_ROWS": rows,
            "BLOCK_M": 32,
            "BLOCK_N": next_power_of_2(rows),
            "FP8": PACKED if fp8 else 0,
            "FP8_QUERY": PACKED if fp8 else 0,
            "HAS_CAP": True,
            "PRECISION": "tf32",
        },
        options={"num_warps": 4, "num_stages": 1},
    )


_TOPK_PARTS = {"*fp32": "peaks sums", "*i32": "best_orders best_tokens"}
"""What the kernels of blocks leave to the one that merges them."""


def _topk_cases(kind: str, topk: int, vocab: int, mapped: bool) -> list[KernelCase]:
    block = _topk_block(kind, topk, vocab, mapped)
    return [block, _biased_topk_block(block, kind, topk), _topk_merge(topk, vocab, mapped)]


def _topk_block(kind: str, topk: int, vocab: int, mapped: bool) -> KernelCase:
    size, warps = topk_block(vocab)
    return KernelCase(
        name=f"topk {kind} topk={topk}",
        function=f"{_KERNELS}.topk:_block_kernel",
        signature={
            "logits": f"*{kind}",
            **argument_types(_TOPK_PARTS),
            **argument_types(
                {"*fp32": "temperature", "*i64": "seeds positions", "*i32": "idx_mapping"}
            ),
            **({"target_ids": "*i64"} if mapped else {}),
            "logits_stride": "i32",
            "vocab_size": "i32",
            "sharpness": "fp32",
        },
        constexprs={
            **({} if mapped else {"target_ids": None}),
            "BLOCKS": cdiv(vocab, size),
            "TOPK": topk,
            "TOPK_PAD": next_power_of_2(topk),
            "BLOCK": size,
            "NOISY": True,
            "ROWS": topk,
            "OFFSET": 1,
            "MAPPED": mapped,
            "FP64": mapped,
        },
        options={"num_warps": warps},
    )


def _biased_topk_block(block: KernelCase, kind: str, topk: int) -> KernelCase:
    """The kernel that adds biases to logits which nodes share, beside that without."""
    plain, of_block = ("logits", "logits_stride"), block.constexprs
    return KernelCase(
        name=f"biased topk {kind} topk={topk}",
        function=f"{_KERNELS}.topk:_biased_block_kernel",
        signature={
            "biases": f"*{kind}",
            "shared": f"*{kind}",
            **{name: type_ for name, type_ in block.signature.items() if name not in plain},
            "bias_stride": "i32",
            "shared_stride": "i32",
        },
        constexprs={
            **{name: of_block[name] for name in of_block if name not in ("ROWS", "OFFSET")},
            "NODES": topk,
            "GROUP": topk // 2,
        },
        options=block.options,
    )


def _topk_merge(topk: int, vocab: int, mapped: bool) -> KernelCase:
    blocks = cdiv(vocab, topk_block(vocab)[0])
    return KernelCase(
        name=f"topk merge blocks={blocks} mapped={mapped}",
        function=f"{_KERNELS}.topk:_merge_kernel",
        signature={
            **argument_types(_TOPK_PARTS),
            "logp": "*fp32",
            "tokens": "*i64",
            **({"target_ids": "*i64"} if mapped else {}),
        },
        constexprs={
            **({} if mapped else {"target_ids": None}),
            "BLOCKS": blocks,
            "BLOCKS_PAD": next_power_of_2(blocks),
            "TOPK": topk,
            "TOPK_PAD": next_power_of_2(topk),
            "ENTRIES_PAD": next_power_of_2(blocks * topk),
            "MAPPED": mapped,
        },
        options={"num_warps": topk_merge_warps(blocks * topk)},
    )


CASES: list[KernelCase] = [
    *_expand_cases(topk=8, steps=6),
    *_expand_cases(topk=10, steps=1),
    *_finish_cases(topk=8, steps=6, nodes=31),
    *_finish_cases(topk=10, steps=7, nodes=63),
    *_finish_cases(topk=1, steps=1, nodes=1),
    *_finish_cases(topk=32, steps=12, nodes=63),
    *_finish_cases(topk=8, steps=6, nodes=63, extra=63),
    *NGRAM_CASES,
    *HISTORY_CASES,
    *_step_cases(),
    *_topk_cases("bf16", topk=8, vocab=32_000, mapped=True),
    *_topk_cases("fp32", topk=32, vocab=128_256, mapped=False),
    _compact_case(unit=8),
    _compact_case(unit=2),
    _scratch_case("bf16", key=128, value=128),
    _scratch_case("fp32", key=80, value=80),
    _scratch_case("bf16", key=512, value=64),
    *attention_cases("bf16", head=128, rows=32, draft=False, fp8=False),
    *attention_cases("bf16", head=128, rows=64, draft=False, fp8=True),
    *attention_cases("bf16", head=256, rows=64, draft=False, fp8=False),
    *attention_cases("bf16", head=128, rows=32, draft=False, fp8=False, crowded=False),
    *attention_cases("bf16", head=256, rows=64, draft=False, fp8=True, crowded=False),
    *attention_cases("bf16", head=256, rows=64, draft=False, fp8=False, window=1024),
    *attention_cases("bf16", head=512, rows=64, draft=False, fp8=False, window=1024),
    *attention_cases("bf16", head=64, rows=32, draft=False, fp8=True, window=128),
    *attention_cases("bf16", head=128, rows=64, draft=False, fp8=False, window=8192, chunked=True),
    *attention_cases("bf16", head=128, rows=8, draft=True, fp8=False, window=512),
    *attention_cases("bf16", head=128, rows=8, draft=True, fp8=False),
    *attention_cases("bf16", head=128, rows=8, draft=True, fp8=False, crowded=False),
    *attention_cases("fp16", head=80, rows=8, draft=True, fp8=True),
    *attention_cases("fp32", head=64, rows=16, draft=False, fp8=False),
    _windowed_table_case(extend=True),
    _windowed_table_case(extend=False),
    _own_rows_case("bf16", head=128, rows=32, fp8=False),
    _own_rows_case("bf16", head=256, rows=64, fp8=False),
    _own_rows_case("fp16", head=80, rows=20, fp8=True),
    _own_rows_case("bf16", head=64, rows=64, fp8=True),
    _own_rows_case("bf16", head=64, rows=32, fp8=False, sinks=True),
    *LATENT_CASES,
]
