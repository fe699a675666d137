"""Specialisations of the kernels that read a row's history, for the test of a CPU machine."""

from __future__ import annotations

from vllm_graft.spec_decode.kernels.history import BLOCK
from vllm_graft.testing.compiling import KernelCase, argument_types

_KERNELS = "vllm_graft.spec_decode.kernels.history"


CASES: list[KernelCase] = [
    KernelCase(
        name="path tokens",
        function=f"{_KERNELS}:_path_kernel",
        signature=argument_types(
            {"*i32": "ids nodes parents depths path_tokens path_lengths", "*i64": "slots"}
        ),
        constexprs={"WIDTH": 64},
        options={"num_warps": 1},
    ),
    KernelCase(
        name="penalties",
        function=f"{_KERNELS}:_penalties_kernel",
        signature=argument_types(
            {
                "*fp32": "logits repetitions frequencies presences",
                "*i64": "slots",
                "*i32": "path_tokens path_lengths prompt_bits counts",
                "i32": "logits_stride bits_stride counts_stride vocab",
            }
        ),
        constexprs={"WIDTH": 64, "BLOCK": BLOCK},
        options={"num_warps": 4},
    ),
    KernelCase(
        name="bad words",
        function=f"{_KERNELS}:_bad_words_kernel",
        signature=argument_types(
            {
                "*fp32": "logits",
                "*i64": "slots",
                "*i32": "path_tokens path_lengths numbers offsets word_tokens all_tokens "
                "prompt_lens total_lens",
                "i32": "logits_stride offsets_stride words_stride tokens_stride",
            }
        ),
        constexprs={"WIDTH": 32},
        options={"num_warps": 1},
    ),
    KernelCase(
        name="thinking budgets",
        function=f"{_KERNELS}:_thinking_kernel",
        signature=argument_types(
            {
                "*fp32": "logits",
                "*i64": "slots",
                "*i32": "path_tokens path_lengths budgets starts ends all_tokens total_lens "
                "start_marker end_marker forced",
                "i32": "logits_stride tokens_stride start_len end_len forced_len",
            }
        ),
        constexprs={"WIDTH": 32, "FORCED": 1.0e9},
        options={"num_warps": 1},
    ),
]
