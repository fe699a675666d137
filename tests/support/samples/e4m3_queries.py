"""Problems of attention whose query is e4m3, as vLLM hands it over beside an e4m3 cache."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch

from vllm_graft.spec_decode.trees.batch import DraftBatch, TreeBatch

Batch = TypeVar("Batch", TreeBatch, DraftBatch)

QUERY_SCALE = 0.3
"""No power of 2, so that a product with it is rounded in 16 bits."""


def with_small_query(problem: Batch) -> Batch:
    """The problem with its query in e4m3, and a scale."""
    scale = torch.tensor(QUERY_SCALE, device=problem.query.device)
    query = (problem.query.float() / scale).to(torch.float8_e4m3fn)
    return replace(problem, query=query, q_scale=scale)


def converted(problem: Batch) -> Batch:
    """The same, converted to bfloat16 as a layer does where kernels take no e4m3 query."""
    assert problem.q_scale is not None
    query = problem.query.to(torch.bfloat16) * problem.q_scale.to(torch.bfloat16)
    return replace(problem, query=query, q_scale=None)
