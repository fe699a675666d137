"""Several matches of a request's own text as a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_graft.spec_decode.kernels.ngram_paths import insert_paths
from vllm_graft.spec_decode.lookup.ngrams import Ngrams

if TYPE_CHECKING:
    from vllm_graft.spec_decode.config.ngram_config import NgramConfig
    from vllm_graft.spec_decode.trees.candidates import CandidateTable


class SeveralNgrams(Ngrams):
    """An `Extra` of several matches, where `Ngrams` has one beside what a draft model drafts.

    Args:
        config: lengths of matches.
        max_reqs: most requests of a batch.
        width: most tokens of a text.
        vocab_size: tokens of the target.
        device: where all of this lies.
        paths: most matches of a text.
        depth: most tokens that follow from a match.
        reference: tokens that the reference of a request may have; 0 for no references.
    """

    def __init__(
        self,
        config: NgramConfig,
        max_reqs: int,
        width: int,
        vocab_size: int,
        device: torch.device,
        *,
        paths: int,
        depth: int,
        reference: int = 0,
    ) -> None:
        super().__init__(
            config, max_reqs, width, vocab_size, device, matches=paths, reference=reference
        )
        self.depth = depth

    def columns(self, num_nodes: int) -> int:
        """A column for each token of each path."""
        return self.state.matches * self._depth(num_nodes)

    def _insert(
        self,
        candidates: CandidateTable,
        slots: torch.Tensor,
        num_reqs: int,
        *,
        levels: int,
        first: int,
        num_nodes: int,
    ) -> None:
        assert self._lengths is not None
        insert_paths(
            candidates,
            self.state,
            self._lengths,
            slots,
            num_reqs,
            first=first,
            depth=self._depth(num_nodes),
            vocab_size=self.vocab_size,
        )

    def _depth(self, num_nodes: int) -> int:
        return min(self.depth, num_nodes)
