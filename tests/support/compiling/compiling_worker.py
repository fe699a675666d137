"""A worker that compiles ahead and then does nothing: ``python compiling_worker.py``.

It prints the id of the process that compiles.
"""

import time

from vllm_graft.spec_decode.kernels.kernel_launch import Launch, Pointer
from vllm_graft.spec_decode.startup.ahead import compile_ahead


def rank_launch(width: int, *, block: int = 32) -> Launch:
    """A launch of the kernel that ranks candidates; a block must be a power of two."""
    sizes = {"WIDTH": width, "CANDIDATES": width, "NODES": 7, "NODES_PAD": 8}
    pointers = (("scores", Pointer("float32", True)), ("chosen", Pointer("int32", True)))
    constants = {**sizes, "BLOCK": block, "OTHERS": 32}
    where = "vllm_graft.spec_decode.kernels.candidates:_rank_kernel"
    return Launch(where, (*pointers, *constants.items()), ())


def main() -> None:
    many = [rank_launch(width) for width in range(100, 400)]
    ahead = compile_ahead(many, ("cuda", 90, 32), 2)
    assert ahead._running is not None
    print(ahead._running._process.pid, flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
