"""The draft tree of each request, from the step that drafts it to the step that verifies it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_graft.spec_decode.trees.shape import MAX_NODES


@dataclass(frozen=True)
class TreeState:
    """Topology by request-state index. Node 0 is the root: the last accepted token.

    Nodes 1 to ``num_nodes`` are drafts, best cumulative score first, so parents come before
    children and the first ``n`` drafts are the best tree of ``n``.

    Attributes:
        parents: i32 ``[max_reqs, num_nodes + 1]``, node index, -1 for the root.
        depths: i32 ``[max_reqs, num_nodes + 1]``, edges from the root.
        masks: i64 ``[max_reqs, num_nodes + 1]``; bit ``j`` is set if node ``j`` is the node itself
            or one of its ancestors. Bit 63 is the sign bit.
    """

    parents: torch.Tensor
    depths: torch.Tensor
    masks: torch.Tensor

    @classmethod
    def allocate(cls, max_reqs: int, num_nodes: int, device: torch.device | str) -> TreeState:
        """Trees for ``max_reqs`` request-state slots, as stars: each draft is a child of the root.

        vLLM reads a tree before one was drafted: it gives placeholders for drafts to a request that
        has one token left to compute. They are rejected, but the root's row has to be right.

        Raises:
            ValueError: if ``num_nodes`` is not 1 to `MAX_NODES`.
        """
        if not 1 <= num_nodes <= MAX_NODES:
            raise ValueError(f"a tree has 1 to {MAX_NODES} draft nodes, not {num_nodes}")
        node = torch.arange(num_nodes + 1, device=device)
        is_draft = (node > 0).to(torch.int32)
        one = torch.ones((), dtype=torch.int64, device=device)
        rows = {"parents": is_draft - 1, "depths": is_draft, "masks": one << node | 1}
        return cls(**{name: row.repeat(max_reqs, 1) for name, row in rows.items()})

    @property
    def width(self) -> int:
        return int(self.parents.shape[1])
