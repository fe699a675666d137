"""A drafter whose tokens come from a table: a minimal new kind of drafter."""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from vllm_graft import hookimpl
from vllm_graft.hooks.entries import Drafter
from vllm_graft.spec_decode.drafters.base import PasslessGrowth
from vllm_graft.spec_decode.drafters.ngram.ngram_trees import NgramTrees
from vllm_graft.spec_decode.drafters.target_dependent import TargetDependentTrees
from vllm_graft.spec_decode.trees.tree import TreeShape

NEXT: dict[int, list[int]] = {}
"""The tokens that follow a token, best first."""

VOCABULARY = 8192
"""At least as many tokens as a target has."""


def learned(answers: Iterable[Sequence[int]]) -> dict[int, list[int]]:
    """Make a table of the tokens that follow each token in some answers."""
    found: dict[int, list[int]] = {}
    for token, after in itertools.chain.from_iterable(map(itertools.pairwise, answers)):
        if after not in found.setdefault(token, []):
            found[token].append(after)
    return found


def table_trees(draft: Path | None = None, **tree: Any) -> dict[str, Any]:
    """Options of an engine with trees of 7 nodes from the table, beside a head or in its place."""
    speculative: dict[str, Any] = {"num_speculative_tokens": 7}
    if draft is None:
        speculative |= {"method": "ngram_gpu", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    else:
        speculative |= {"method": "eagle3", "model": str(draft)}
    keys = {"topk": 2, "steps": 4, "drafter": "table" if draft else "table_alone", **tree}
    return {"speculative_config": speculative, "additional_config": {"graft": {"tree": keys}}}


def following(tokens: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities and tokens ``[rows, topk]`` that follow ``tokens [rows]``."""
    logp = -torch.arange(1.0, topk + 1, device=tokens.device)
    return logp.expand(len(tokens), topk).contiguous(), _table(topk, tokens.device)[tokens]


_tables: dict[tuple[int, torch.device], tuple[dict[int, list[int]], torch.Tensor]] = {}
"""What `_table` has made, each with the `NEXT` that it was made of."""


def _table(topk: int, device: torch.device) -> torch.Tensor:
    """`NEXT` as int64 ``[VOCABULARY, topk]``; a token that it lacks is followed by itself."""
    source, table = _tables.get((topk, device), (None, torch.empty(0)))
    # A CUDA graph can't hold a copy from the host, so the table is made by the warm-up before it.
    if source is not NEXT:
        rows = [(NEXT.get(token, []) + [token] * topk)[:topk] for token in range(VOCABULARY)]
        table = torch.tensor(rows, device=device)
        _tables[topk, device] = NEXT, table
    return table


class TableGrowth(PasslessGrowth):
    """Grows trees level by level from the table; needs no pass of any model."""

    def grow(
        self, drafter: Any, num_reqs: int, *args: Any, num_nodes: int, narrow: bool = False
    ) -> int:
        topk = self.shape.topk
        frontier = self.tokens[: num_reqs * topk]
        first = drafter.first_level(num_reqs)
        return self.fill(first, lambda _: following(frontier, topk), num_reqs, num_nodes)


class TableTrees(TargetDependentTrees, EagleSpeculator):
    """A mixin over vLLM's EAGLE speculator that never asks the draft model for a token."""

    growth_bytes = 0

    def make_growths(  # type: ignore[override]
        self, shapes: Collection[TreeShape], layers: Mapping[str, Any]
    ) -> dict[TreeShape, TableGrowth]:
        super().make_growths(shapes, layers)
        return {shape: TableGrowth(shape, self.max_num_reqs, self.device) for shape in shapes}

    def sample_draft(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        num_reqs = hidden_states.shape[0]
        roots = self.input_buffers.input_ids[self.last_token_indices[:num_reqs]]
        first = self.first_level(num_reqs)
        for kept, found in zip(first, following(roots, self.trees.shape.topk)):
            kept.copy_(found)
        return first[1][:, 0]


class LastTokenGrowth(TableGrowth):
    """Takes the first level from the table, too."""

    def grow(
        self, drafter: Any, num_reqs: int, *args: Any, num_nodes: int, narrow: bool = False
    ) -> int:
        topk = self.shape.topk
        frontier = self.tokens[: num_reqs * topk]
        first = following(drafter.last_tokens[:num_reqs], topk)
        return self.fill(first, lambda _: following(frontier, topk), num_reqs, num_nodes)


class TableWithoutModel(NgramTrees):
    """Drafts for targets that have no draft model; what n-grams find joins the trees."""

    def make_growths(  # type: ignore[override]
        self, shapes: Collection[TreeShape], layers: Mapping[str, Any]
    ) -> dict[TreeShape, LastTokenGrowth]:
        self.table_growths = {
            shape: LastTokenGrowth(shape, self.max_num_reqs, self.device, extra=self.extra_columns)
            for shape in shapes
        }
        return self.table_growths

    @property
    def growth_bytes(self) -> int:
        return sum(growth.num_bytes for growth in self.table_growths.values())


@hookimpl
def graft_drafters() -> list[Drafter]:
    methods = ("eagle", "eagle3")
    load = "tests.support.models.table_drafter:TableTrees"
    return [
        Drafter("table", load, "tokens from a table", methods=methods),
        Drafter(
            "table_alone",
            "tests.support.models.table_drafter:TableWithoutModel",
            "tokens from a table, without a draft model",
            methods=("ngram", "ngram_gpu"),
            speculator="vllm.v1.worker.gpu.spec_decode.ngram.speculator:NgramGPUSpeculator",
            has_model=False,
        ),
    ]
