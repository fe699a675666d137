"""Data-parallel ranks on a CPU that share experts, for which vLLM has no collectives there."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support.engines.vllm_server import free_port

REPLICAS = "GRAFT_TEST_REPLICAS"
"""Environment variable: the CPU's communicator gets the two collectives of experts."""


def replica(rank: int, size: int, port: int) -> dict[str, str]:
    """The environment of a data-parallel rank.

    Its process has the engine core, so that it goes on with dummy batches until all have ended.
    """
    told = {"RANK": rank, "SIZE": size, "MASTER_PORT": port}
    ranks = {f"VLLM_DP_{name}": str(value) for name, value in told.items()}
    return {REPLICAS: "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **ranks}


def mend(module: ModuleType) -> None:
    """Add what vLLM's ``cpu_communicator``, the module, lacks for experts on several ranks."""

    def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: Any = None) -> Any:
        one = not isinstance(input_, list)
        found = [gathered(each, sizes, self.device_group) for each in ([input_] if one else input_)]
        return found[0] if one else found

    def reduce_scatterv(self: Any, input_: Any, dim: int = 0, sizes: Any = None) -> Any:
        return scattered(input_, sizes, self.rank_in_group, self.device_group)

    for function in (all_gatherv, reduce_scatterv):
        setattr(module.CpuCommunicator, function.__name__, function)


def gathered(rows: Any, sizes: Sequence[int], group: Any) -> Any:
    """The rows ``[sizes[rank], ...]`` of all ranks, one after the other."""
    import torch

    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: len(rows)] = rows
    ranks = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(ranks, padded, group=group)
    return torch.cat([each[:size] for each, size in zip(ranks, sizes)])


def scattered(rows: Any, sizes: Sequence[int], rank: int, group: Any) -> Any:
    """The sum over all ranks of rows ``[sum(sizes), ...]``, of which this rank gets its part."""
    import torch

    total = rows.clone()
    torch.distributed.all_reduce(total, group=group)
    return total.split(list(sizes))[rank].contiguous()


def on_all_ranks(folder: Path, ask: Any, questions: Sequence[Any]) -> list[Any]:
    """Answer the questions of each rank by `ask(folder, questions, environment)`, all at once."""
    port = free_port()

    def one(rank: int) -> Any:
        own = folder / f"rank{rank}"
        own.mkdir(parents=True)
        return ask(own, questions[rank], replica(rank, len(questions), port))

    with ThreadPoolExecutor(len(questions)) as pool:
        return list(pool.map(one, range(len(questions))))
