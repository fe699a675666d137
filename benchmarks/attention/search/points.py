"""What the search is about: layers, requests, rows and keys; the most important first."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from benchmarks.attention.problems import problems
from benchmarks.attention.shapes import SHAPES, KvLayer
from vllm_graft.spec_decode.targets.dense.choice import Point
from vllm_graft.spec_decode.trees.batch import DraftBatch, TreeBatch

Batch = TreeBatch | DraftBatch


def _layer(shape: str, number: int, name: str) -> KvLayer:
    layer = SHAPES[shape][number]
    assert isinstance(layer, KvLayer)
    return replace(layer, name=name)


LLAMA = _layer("llama-8b", 0, "llama")
GEMMA_FULL = _layer("gemma-3", 0, "gemma full")
GEMMA_WINDOW = _layer("gemma-3", 1, "gemma window")
WIDE = KvLayer("head 512", 8, 2, 512, alike=False)
"""Heads of 512, as full layers of Gemma 4 have them; the numbers of heads are Gemma 3's, halved."""

STEPS = 6
"""Levels of a draft; the last level is timed, which reads most."""


@dataclass(frozen=True)
class Problem:
    """One launch to search for.

    Attributes:
        layer: the attention layer.
        num_reqs: requests.
        rows: rows of each one's tree, or of a draft's level.
        context: keys of each request; of a draft, its prefix.
        draft: whether it is a level of a draft.
    """

    layer: KvLayer
    num_reqs: int
    rows: int
    context: int
    draft: bool = False

    @property
    def name(self) -> str:
        kind = " draft" if self.draft else ""
        return f"{self.layer.name}{kind} {self.num_reqs}x{self.rows} after {self.context}"

    @property
    def group(self) -> tuple[KvLayer, int, bool]:
        """Problems of one group share compiled kernels."""
        return self.layer, self.rows, self.draft


def _verify(layer: KvLayer, *sizes: tuple[int, int, int]) -> list[Problem]:
    return [Problem(layer, *size) for size in sizes]


PROBLEMS: tuple[Problem, ...] = (
    *_verify(LLAMA, (16, 8, 350), (1, 32, 2048), (1, 32, 350)),
    *_verify(GEMMA_WINDOW, (16, 32, 2048), (4, 32, 2048), (1, 32, 2048)),
    *_verify(LLAMA, (4, 32, 350), (4, 32, 2048), (1, 32, 8192), (1, 32, 32768)),
    *_verify(LLAMA, (16, 8, 2048), (4, 8, 350), (64, 8, 350), (1, 8, 2048)),
    *_verify(GEMMA_FULL, (1, 32, 2048), (1, 32, 8192), (1, 32, 32768), (4, 32, 2048)),
    *_verify(GEMMA_FULL, (16, 32, 2048), (16, 32, 350)),
    *_verify(LLAMA, (4, 16, 350), (4, 16, 2048), (16, 16, 350), (1, 16, 2048)),
    *(Problem(LLAMA, *size, draft=True) for size in ((1, 8, 350), (1, 8, 2048), (4, 8, 350))),
    *_verify(GEMMA_WINDOW, (16, 8, 2048), (4, 8, 2048), (1, 8, 2048), (64, 8, 2048)),
    *_verify(GEMMA_FULL, (16, 8, 350), (4, 8, 2048), (1, 8, 8192), (16, 8, 2048)),
    *_verify(LLAMA, (1, 64, 350), (1, 64, 2048), (1, 64, 8192)),
    *_verify(WIDE, (1, 32, 2048), (1, 32, 8192), (4, 32, 2048), (16, 32, 2048)),
    *(Problem(LLAMA, *size, draft=True) for size in ((16, 4, 350), (16, 4, 2048), (4, 4, 350))),
    *_verify(LLAMA, (64, 4, 350), (64, 4, 2048), (16, 4, 350), (16, 4, 2048)),
    *_verify(WIDE, (16, 8, 350), (4, 8, 2048), (1, 8, 2048)),
    *_verify(GEMMA_WINDOW, (16, 16, 2048), (1, 16, 2048), (1, 64, 2048), (4, 64, 2048)),
    *(Problem(LLAMA, *size, draft=True) for size in ((64, 2, 350), (64, 2, 2048))),
)


def shard(part: str) -> list[Problem]:
    """The problems of a part ``I/N``, 1/1 for all: whole groups, so that nothing is compiled twice.

    Raises:
        ValueError: if it is no such part.
    """
    number, _, count = part.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise ValueError(f"a part is I/N with I from 1 to N, got {part!r}")
    groups = list(dict.fromkeys(problem.group for problem in PROBLEMS))
    mine = groups[int(number) - 1 :: int(count)]
    return [problem for problem in PROBLEMS if problem.group in mine]


def batches_of(
    problem: Problem,
    copies: int,
    device: torch.device | str,
    longest: int,
    **sizes: int,
) -> list[Batch]:
    """Batches over blocks of their own, whose tables are those of an engine's longest context.

    Args:
        problem: what is computed.
        copies: number of batches.
        device: where they are.
        longest: keys of the longest request that the engine takes.
        sizes: as in `problems`.
    """
    context = problem.context
    if problem.draft:
        # The keys of a tree's own rows are in its cache, those of a draft's are not.
        context = max(context, problem.rows)
    point = Point(problem.num_reqs, problem.rows, context)
    trees = problems(problem.layer, point, copies, device, **sizes)
    columns = -(-max(longest, context) // problem.layer.block_size)
    found: list[Batch] = []
    for tree in trees:
        assert isinstance(tree, TreeBatch)
        table = torch.zeros(problem.num_reqs, columns, dtype=torch.int32, device=device)
        table[:, : tree.block_table.shape[1]] = tree.block_table
        tree = replace(tree, block_table=table, max_seq_len=max(longest, context))
        found.append(_level(tree, problem) if problem.draft else tree)
    return found


def _level(tree: TreeBatch, problem: Problem) -> DraftBatch:
    """The last level of a draft over the keys of trees."""
    topk, reqs, device = problem.rows, problem.num_reqs, tree.query.device
    layer, generator = problem.layer, torch.Generator().manual_seed(0)
    ancestors = torch.randint(0, topk, (reqs, topk, STEPS), generator=generator)
    ancestors[:, :, STEPS - 1] = torch.arange(topk)
    ancestors += torch.arange(STEPS) * topk
    size = (reqs, STEPS * topk, layer.kv_heads, 2 * layer.head_size)
    scratch = torch.randn(size, generator=generator)
    return DraftBatch(
        query=tree.query,
        kv_cache=tree.kv_cache,
        scratch_kv=scratch.to(device, tree.query.dtype),
        ancestors=ancestors.to(device, torch.int32),
        level=STEPS - 1,
        prefix_lens=tree.seq_lens,
        block_table=tree.block_table,
        num_reqs=reqs,
        topk=topk,
        scale=tree.scale,
        max_seq_len=tree.max_seq_len,
    )
