"""What the target's attention needs to know about the rows of a batch that verifies trees."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TreeRows:
    """Which rows of a batch belong to trees, and what each of them sees. Addresses are stable.

    Attributes:
        num_drafts: i32 ``[max_reqs]`` by batch row, drafts that a request verifies; 0 for a plain
            request.
        row_masks: i64 ``[max_tokens]``; bit ``j`` is set if the row sees the request's ``j``-th
            tree row.
        row_depths: i32 ``[max_tokens]``, position of the row behind the first of its request's
            rows that the tree kernel computes.
        row_parents: i32 ``[max_tokens]``, the row that comes before a row on its path, counted from
            its request's first row; -1 for the first one. In a request without drafts that is the
            row before. Rows of longer plain queries than the tree kernel computes keep old numbers.
        num_rows: i32 ``[max_reqs]`` by batch row, how many of the query's last rows the tree
            kernel computes.
        prefix_lens: i32 ``[max_reqs]`` by batch row, keys before these rows; 0 for a request
            without such rows.
        plain_lens: i32 ``[max_reqs]`` by batch row, keys that the platform's attention reads. It is
            0 where all rows belong to a tree, so that the platform's attention skips them.
    """

    num_drafts: torch.Tensor
    row_masks: torch.Tensor
    row_depths: torch.Tensor
    row_parents: torch.Tensor
    num_rows: torch.Tensor
    prefix_lens: torch.Tensor
    plain_lens: torch.Tensor

    @classmethod
    def allocate(cls, max_reqs: int, max_tokens: int, device: torch.device | str) -> TreeRows:
        """Zeroed tensors for at most ``max_reqs`` requests and ``max_tokens`` rows in a batch."""

        def per_request() -> torch.Tensor:
            return torch.zeros(max_reqs, dtype=torch.int32, device=device)

        masks = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        depths, parents = torch.zeros(2, max_tokens, dtype=torch.int32, device=device)
        return cls(
            per_request(), masks, depths, parents, per_request(), per_request(), per_request()
        )

    def clear(self) -> None:
        """Leave every request without tree rows and without keys for the platform's attention."""
        for lengths in (self.num_rows, self.prefix_lens, self.plain_lens):
            lengths.zero_()
