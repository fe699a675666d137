"""Rows of a batch that recurrent layers compute as trees, and where their states lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RecurrentRows:
    """Rows of the requests that vLLM verifies drafts of, request after request.

    A request has a *column* for each of its rows: a block that keeps the state after this row.

    Attributes:
        parents: i32 ``[num_rows]``, the row that a row continues, counted from the first row of
            its request; -1 for the first one. Parents come before children.
        query_start_loc: i32 ``[>= num_reqs + 1]``, the first row of each request.
        columns: i32 ``[>= num_reqs, num_nodes + 1]``, blocks; 0 is the null block, which is neither
            read nor written.
        num_accepted: i32 ``[>= num_reqs]``, how many rows of the step before count: the first row
            continues the state in column ``num_accepted - 1``.
        num_reqs: requests, padding of a graph included.
    """

    parents: torch.Tensor
    query_start_loc: torch.Tensor
    columns: torch.Tensor
    num_accepted: torch.Tensor
    num_reqs: int
