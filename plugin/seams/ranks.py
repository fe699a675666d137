"""What ranks decide together: the tensor-parallel ones of a worker, unless another group is named.
Ranks that call these functions in the same order agree. An ordinary step never calls them, because
the exchange waits for the slowest rank on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.distributed.parallel_state import GroupCoordinator


def gather(value: Any) -> list[Any]:
    """The values of all ranks, by rank; each can be pickled."""
    return _gathered(value, _group())


def gather_replicas(value: Any) -> list[Any]:
    """The values of the data-parallel ranks that step together, by rank."""
    from vllm.distributed import get_dp_group, model_parallel_is_initialized

    return _gathered(value, get_dp_group() if model_parallel_is_initialized() else None)


def _gathered(value: Any, group: GroupCoordinator | None) -> list[Any]:
    import torch

    if group is None or group.world_size == 1:
        return [value]
    values: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


def all_ranks_agree(ok: bool) -> bool:
    """Whether all ranks say yes, so that each goes the same way."""
    return all(gather(ok))


def gather_rows(rows: torch.Tensor) -> torch.Tensor:
    """The tensors ``[n, ...]`` of all ranks, as ``[ranks, n, ...]``; the host does not wait."""
    import torch

    group = _group()
    if group is None:
        return rows[None]
    if rows.device.type != "cpu":
        return group.all_gather(rows[None], dim=0)
    # Where a CPU has AVX-512, vLLM's ranks share memory, by a collective for numbers of few dtypes.
    ranks = rows.new_empty(group.world_size, *rows.shape)
    torch.distributed.all_gather_into_tensor(ranks, rows[None], group=group.cpu_group)
    return ranks


def _group() -> GroupCoordinator | None:
    """The ranks of this one's model; None for a rank alone, and outside of an engine."""
    from vllm.distributed import get_tp_group, model_parallel_is_initialized

    group = get_tp_group() if model_parallel_is_initialized() else None
    return group if group is not None and group.world_size > 1 else None
