"""The drafter: EAGLE's place in vLLM, and a table in place of EAGLE's levels."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from vllm_graft.api import ConfigError, PasslessGrowth, TargetDependentTrees, TreeShape

VARIABLE = "GRAFT_BIGRAM_TABLE"


def read_table(num_tokens: int, topk: int) -> torch.Tensor:
    """Return the tokens that follow each token, best first, int64 ``[num_tokens, topk]``.

    Raises:
        ConfigError: if the file is no such table.
    """
    path = os.environ.get(VARIABLE, "")
    try:
        following = json.loads(Path(path).read_text()) if path else {}
        rows = [
            (following.get(str(token), []) + [token] * topk)[:topk] for token in range(num_tokens)
        ]
        table = torch.tensor(rows, dtype=torch.int64)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{VARIABLE}={path!r} is no table: {error}. Name a JSON file with a list of tokens for "
            "each token, or unset the variable."
        ) from error
    if not bool(((table >= 0) & (table < num_tokens)).all()):
        raise ConfigError(f"{VARIABLE}={path!r} has tokens that the model lacks: make another one.")
    return table


class BigramGrowth(PasslessGrowth):
    """Grows trees level by level from the table."""

    def __init__(self, shape: TreeShape, max_reqs: int, table: torch.Tensor) -> None:
        super().__init__(shape, max_reqs, table.device)
        self.table = table
        # A table has no probabilities: each child counts less than its better siblings.
        logp = -torch.arange(1.0, shape.topk + 1, device=table.device)
        self.logp = logp.expand(len(self.tokens), -1).contiguous()

    def grow(
        self, drafter: Any, num_reqs: int, *args: Any, num_nodes: int, narrow: bool = False
    ) -> int:
        """Fill the table of candidates; a CUDA graph may hold this."""
        rows = num_reqs * self.shape.topk
        logp, frontier = self.logp[:rows], self.tokens[:rows]
        first = drafter.first_level(num_reqs)
        return self.fill(first, lambda _: (logp, self.table[frontier]), num_reqs, num_nodes)


class BigramTrees(TargetDependentTrees, EagleSpeculator):
    """Stands in the place of vLLM's EAGLE speculator, whose draft model is loaded and not asked."""

    growth_bytes = 0

    def make_growths(
        self, shapes: Collection[TreeShape], layers: Mapping[str, Any]
    ) -> dict[TreeShape, BigramGrowth]:
        """Make what grows the trees of each shape."""
        super().make_growths(shapes, layers)
        topk = max(shape.topk for shape in shapes)
        num_tokens = self.vllm_config.model_config.get_vocab_size()
        self.table = read_table(num_tokens, topk).to(self.device)
        return {
            shape: BigramGrowth(shape, self.max_num_reqs, self.table[:, : shape.topk].contiguous())
            for shape in shapes
        }

    def sample_draft(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Leave the root's children: those of the last accepted token."""
        num_reqs = hidden_states.shape[0]
        roots = self.input_buffers.input_ids[self.last_token_indices[:num_reqs]]
        logp, tokens = self.first_level(num_reqs)
        width = logp.shape[1]
        logp.copy_(-torch.arange(1.0, width + 1, device=logp.device).expand(num_reqs, width))
        tokens.copy_(self.table[roots.to(torch.int64)][:, :width])
        return tokens[:, 0]
