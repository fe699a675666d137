"""Negative controls of recurrent layers: rows of trees that continue another state than theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from vllm_graft.spec_decode.targets.recurrent.kernels.gates import RecurrentRows


def in_order(stock: Callable[..., Any]) -> Callable[..., None]:
    """What computes rows, told that each row follows the one before."""

    def spoilt(*args: Any, **kwargs: Any) -> None:
        [which] = [each for each in args if isinstance(each, RecurrentRows)]
        chain = torch.full_like(which.parents, -1)
        for first, end in zip(which.query_start_loc, which.query_start_loc[1:]):
            chain[first:end] = torch.arange(-1, end - first - 1)
        others = replace(which, parents=chain)
        stock(*(others if each is which else each for each in args), **kwargs)

    return spoilt


def first_rows(fold_states: Callable[..., Any]) -> Callable[..., None]:
    """What folds accepted rows into states, told that the first rows were accepted."""

    def spoilt(
        folds: Any, kept: Any, starts: Any, path: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        chain = torch.arange(path.shape[1], dtype=path.dtype, device=path.device)
        fold_states(folds, kept, starts, chain.expand_as(path).contiguous(), *args, **kwargs)

    return spoilt
