"""The interfaces between a drafter and the growing of its trees. A drafter's first pass leaves the
root's best children or what they are drafted from, a `Growth` fills the table of candidates from
there, an `Extra` may add candidates of another source, and the best of all become the tree.
Verification needs nothing else of a drafter."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from vllm_graft.spec_decode.heads.head import DraftHead
from vllm_graft.spec_decode.kernels.candidates import expand_frontier, seed_frontier
from vllm_graft.spec_decode.kernels.topk import Noise
from vllm_graft.spec_decode.trees.tree import CandidateTable, TreeShape
from vllm_graft.spec_decode.verification.context import TreeContext


class Drafter(Protocol):
    """A speculator after its first pass, as a growth sees it.

    R is the number of requests of the batch, padding included. `idx_mapping`: int64 ``[>= R]``,
    request-state index of each row of the batch; -1 is padding. `draft_tokens`: int64 ``[>= R,
    nodes]``, receives the drafts. `max_model_len`: positions end below it."""

    context: TreeContext
    head: DraftHead
    idx_mapping: torch.Tensor
    draft_tokens: torch.Tensor
    max_model_len: int

    @property
    def last_positions(self) -> torch.Tensor:
        """int64 ``[>= R]``, position of the last token whose states the first pass has seen."""

    @property
    def last_states(self) -> torch.Tensor:
        """``[>= R, hidden]``, the states that the first level continues from."""

    def first_level(self, num_reqs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the root's best children are, best first. Returns log-probabilities, f32
        ``[num_reqs, >= topk]``, and token ids of the target, int64."""

    def draft_first_level(
        self, num_reqs: int, *, narrow: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft the root's best children, and leave them in `first_level`, which is returned.
        Capturable. With `narrow` they come from the head's learned vocabulary."""

    def run_frontier(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor,
        metadata: Any,
        num_tokens_across_dp: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the draft model over the rows of a frontier. Capturable. Returns states for the head
        and those that the next level continues from, ``[rows, hidden]`` each.

        Args:
            tokens: int32 or int64 ``[rows]``.
            positions: int64 ``[rows]``.
            states: ``[rows, hidden]`` of the rows' parents; may be overwritten.
            metadata: attention metadata by layer name; None runs without attention.
            num_tokens_across_dp: int32 ``[dp_size]`` on the CPU, rows of all data-parallel ranks.
        """

    def noise(
        self, num_reqs: int, positions: torch.Tensor, *, rows: int, offset: int
    ) -> Noise | None:
        """The noise that the target will draw with, ``offset`` tokens after ``positions``.
        `positions` are int64 ``[num_reqs * rows]``. None ranks drafts by probability alone."""


class Growth(Protocol):
    """Fills the table of candidates from what a drafter's first pass has left. Its tensors have
    fixed addresses, so that a CUDA graph may hold :meth:`grow`. It does not keep the drafter, which
    is passed to it: the two would keep each other alive."""

    shape: TreeShape
    candidates: CandidateTable

    def set_prefix(self, seq_lens: torch.Tensor, num_rejected: torch.Tensor) -> None:
        """Note how many keys precede each tree, from int32 ``[num_reqs]`` each."""

    def clear_prefix(self) -> None:
        """Make every row padding: a run then reads no cache."""

    def map_block_tables(self, drafter: Any) -> None:
        """Refresh block tables from the engine's. Not capturable."""

    def metadata(self, num_reqs: int, max_seq_len: int) -> list[Any]:
        """Attention metadata of every pass. Not capturable."""

    def grow(
        self, drafter: Drafter, num_reqs: int, metadata: list[Any] | None,
        num_tokens_across_dp: torch.Tensor | None = None, *, num_nodes: int, narrow: bool = False,
    ) -> int:  # fmt: skip
        """Fill the table, and return the number of levels that it holds. Capturable. `metadata` is
        what the method of this name returned, and `num_tokens_across_dp` that of
        `Drafter.run_frontier`. The engine keeps `num_nodes`; the best n nodes lie in the first n
        levels. With `narrow` they are chosen from the head's learned vocabulary."""


class Extra(Protocol):
    """Another source of candidates, such as n-grams of the request's own text."""

    def columns(self, num_nodes: int) -> int:
        """Columns of the table that it takes for trees of so many nodes; never more for fewer."""

    def add(
        self, candidates: CandidateTable, drafter: Drafter, num_reqs: int, levels: int, *,
        first: int, num_nodes: int,
    ) -> None:  # fmt: skip
        """Put candidates into the table before the best are chosen. Capturable.

        A candidate's score must not exceed its parent's, of which it may raise those in the table,
        and its parent must have a lower index. Siblings must differ in their token.

        Args:
            candidates: holds `levels` levels.
            drafter: its ``idx_mapping`` has the requests.
            num_reqs: requests, padding included; padding has request-state index -1.
            first: first of its `columns`. All are to be written, those without a candidate with
                -inf.
        """


Children = tuple[torch.Tensor, torch.Tensor]
"""Log-probabilities f32 and the target's token ids int64, of the same shape."""


class PasslessGrowth:
    """Base of a `Growth` that reads no cache: a subclass has `grow`, which calls `fill`. `tokens`:
    int64 ``[max_reqs * topk]``, tokens of the frontier."""

    def __init__(
        self, shape: TreeShape, max_reqs: int, device: torch.device, *, extra: int = 0
    ) -> None:
        self.shape = shape
        self.candidates = CandidateTable.allocate(
            max_reqs, shape.topk, shape.steps, device, extra=extra
        )
        self.tokens = torch.zeros(max_reqs * shape.topk, dtype=torch.int64, device=device)
        self._parents = torch.zeros_like(self.tokens)

    @property
    def num_bytes(self) -> int:
        tensors = [*vars(self.candidates).values(), self.tokens, self._parents]
        return sum(tensor.nbytes for tensor in tensors)

    def set_prefix(self, seq_lens: torch.Tensor, num_rejected: torch.Tensor) -> None:
        """Do nothing: no keys are read."""

    def clear_prefix(self) -> None: ...

    def map_block_tables(self, drafter: Any) -> None: ...

    def metadata(self, num_reqs: int, max_seq_len: int) -> list[Any]:
        return []

    def fill(
        self, first: Children, below: Callable[[int], Children], num_reqs: int, num_nodes: int
    ) -> int:
        """Fill the table, and return the number of levels that it holds. Capturable if `below` is.
        `first` are the root's best children, ``[num_reqs, topk]`` each, best first. `below` returns
        the best children of a level's frontier by the number of the level, as `expand_frontier`
        takes them; `tokens` has the frontier's."""
        steps = min(self.shape.steps, num_nodes)
        seed_frontier(self.candidates, *first, num_reqs, next_tokens=self.tokens)
        for level in range(1, steps):
            logp, tokens = below(level)
            expand_frontier(
                self.candidates, level, logp, tokens, num_reqs, next_tokens=self.tokens,
                parent_rows=self._parents,
            )  # fmt: skip
        return steps
