"""In a process that compiles: Triton's own key of a call, and of the launch that describes it.

``python launch_keys.py`` prints a line of JSON per pair of calls of `CALLS`: whether Triton takes
both for one specialisation, whether their `Launch` are equal, and whether a `Launch` has the very
key of its call.
"""

import json
from typing import Any

import torch
from triton import knobs

from vllm_graft.spec_decode.kernels import candidates, compact, topk
from vllm_graft.spec_decode.kernels.kernel_launch import Launch, describe
from vllm_graft.spec_decode.startup.compiler import compile_launch, pretend_gpu

Call = tuple[Any, list[Any], dict[str, Any]]

ROOM = torch.zeros(64, dtype=torch.float32)
ALIGNED, SHIFTED = ROOM[:8], ROOM[1:9]
IDS = torch.zeros(64, dtype=torch.int64)


def _seed(logp: Any, stride: int, ids: Any = IDS) -> Call:
    sizes = {"WIDTH": 20, "STEPS": 4, "TOPK": 4, "TOPK_PAD": 4, "HAS_NEXT": ids is not None}
    tensors = [logp, IDS, ROOM, IDS, IDS, ROOM, IDS, IDS, ids]
    return candidates._seed_kernel, [*tensors, stride, 4], {**sizes, "num_warps": 1}


def _expand(level: int, stride: int) -> Call:
    sizes = {"WIDTH": 20, "STEPS": 4, "STEPS_PAD": 4, "TOPK": 4, "TOPK_PAD": 4, "CHILDREN_PAD": 16}
    tensors = [ROOM, IDS, ROOM, IDS, IDS, ROOM, IDS, IDS, IDS, IDS]
    return candidates._expand_kernel, [*tensors, stride, 4, 16, 4, level], {**sizes, "num_warps": 1}


def _block(sharpness: float, rows: int) -> Call:
    sizes = {"BLOCKS": 1, "TOPK": 4, "TOPK_PAD": 4, "BLOCK": 512, "NOISY": False, "ROWS": rows}
    flags = {"OFFSET": 0, "NODES": 1, "GROUP": 1, "MAPPED": False, "FP64": False, "num_warps": 1}
    tensors = [ROOM, None, None, None, None, None, None, ROOM, ROOM, IDS, IDS]
    return topk._block_kernel, [*tensors, 512, 0, 500, sharpness], {**sizes, **flags}


def _compact(unit: int, stride: int) -> Call:
    sizes = {"UNIT": compact._UNITS[unit], "WIDTH_PAD": 64, "num_warps": 1, "num_stages": 1}
    return compact._compact_kernel, [IDS, IDS, IDS, IDS, IDS, IDS, IDS, 32, stride], sizes


CALLS: list[Call] = [
    *[_seed(logp, stride) for logp in (ALIGNED, SHIFTED) for stride in (0, 1, 4, 16, 32, 1 << 33)],
    _seed(ALIGNED, 4, None),
    _seed(ALIGNED, (1 << 33) + 1),
    *[_expand(level, stride) for level in (1, 2, 16) for stride in (1, 4)],
    *[_block(sharpness, rows) for sharpness in (1.0, 1.12) for rows in (1, 4)],
    *[_compact(unit, stride) for unit in (2, 8) for stride in (3, 5, 64)],
]


def main() -> None:
    pretend_gpu(("cuda", 90, 32))
    # Triton asks this hook before it compiles, and compiles nothing if it says so.
    seen: list[str] = []

    def instead_of_compiling(*, key: str, **others: Any) -> bool:
        seen.append(key)
        return True

    knobs.runtime.jit_cache_hook = instead_of_compiling
    found: list[tuple[str, str, Launch]] = []
    for kernel, args, kwargs in CALLS:
        launch = describe(kernel.fn, tuple(args), kwargs)
        kernel.fn.run(*args, grid=(1,), warmup=True, **kwargs)
        compile_launch(launch)
        found.append((f"{launch.kernel} {seen[-2]}", f"{launch.kernel} {seen[-1]}", launch))
    for number, (called, described, launch) in enumerate(found):
        for other, _, its in found[: number + 1]:
            print(json.dumps([called == other, launch == its, called == described]))


if __name__ == "__main__":
    main()
