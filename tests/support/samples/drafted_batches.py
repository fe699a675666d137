"""The context, and stand-ins for the batch, of a step that verifies drafts."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_graft.spec_decode.trees.tree import TreeShape
from vllm_graft.spec_decode.verification.context import TreeContext

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drafted_batch(lengths: list[int], drafts: list[int], padding: int = 0) -> Any:
    """Requests with so many rows each, of which so many are drafts, and `padding` requests."""
    starts = np.cumsum([0, *lengths])
    return SimpleNamespace(
        num_reqs=len(lengths),
        num_reqs_after_padding=len(lengths) + padding,
        num_draft_tokens=sum(drafts),
        num_draft_tokens_per_req=np.array(drafts),
        idx_mapping=torch.arange(len(lengths), device=DEVICE),
        idx_mapping_np=np.arange(len(lengths)),
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        cu_num_logits=torch.tensor(np.cumsum([0, *(d + 1 for d in drafts)]), device=DEVICE).int(),
        positions=torch.arange(int(starts[-1]), device=DEVICE) + 100,
    )


def drafted_context() -> TreeContext:
    """A context of four slots whose trees have two children of the root, each with one."""
    shape = TreeShape(topk=2, steps=3, num_nodes=4)
    context = TreeContext.allocate(shape, 4, 32, SimpleNamespace(), torch.device(DEVICE))  # type: ignore[arg-type]
    context.tree.depths[:] = torch.tensor([0, 1, 1, 2, 2])
    context.tree.masks[:] = torch.tensor([0b1, 0b11, 0b101, 0b1011, 0b10101])
    return context
