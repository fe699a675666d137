"""The draft tree of each request, from the step that drafts it to the step that verifies it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TreeState:
    """Topology by request-state index. Node 0 is the root: the last accepted token.

    Nodes 1 to ``num_nodes`` are drafts, best cumulative score first, so parents come before
    children and the first ``n`` drafts are the best tree of ``n``.

    Attributes:
        parents: i32 ``[max_reqs, num_nodes + 1]``, node index, -1 for the root.
        depths: i32 ``[max_reqs, num_nodes + 1]``, edges from the root.
        masks: i64 ``[max_reqs, num_nodes + 1]``, bit ``j`` set if node ``j`` is the node or an
            ancestor of it; bit 63 is the sign bit.
    """

    parents: torch.Tensor
    depths: torch.Tensor
    masks: torch.Tensor

    @classmethod
    def allocate(cls, max_reqs: int, num_nodes: int, device: torch.device | str) -> TreeState:
        """Trees of ``num_nodes`` (1 to 63) drafts for ``max_reqs`` state slots: all drafts are
        children of the root.

        A tree is read before one was drafted: vLLM gives placeholders for drafts to a request that
        has one token left to compute. They are rejected, but the root's row has to be right.
        """
        if not 1 <= num_nodes <= 63:
            raise ValueError(f"a tree has 1 to 63 draft nodes (int64 masks), not {num_nodes}")
        node = torch.arange(num_nodes + 1, device=device)
        is_draft = (node > 0).to(torch.int32)
        one = torch.ones((), dtype=torch.int64, device=device)
        rows = {"parents": is_draft - 1, "depths": is_draft, "masks": one << node | 1}
        return cls(**{name: row.repeat(max_reqs, 1) for name, row in rows.items()})

    @property
    def width(self) -> int:
        """Nodes of a tree, the root included."""
        return int(self.parents.shape[1])
