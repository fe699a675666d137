"""N-grams of a request's own text as candidates beside the draft's."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

import torch

from vllm_graft.spec_decode.counts.tree_metrics import REFERENCE_DECLINES, REFERENCE_SOURCES
from vllm_graft.spec_decode.kernels.ngram_insert import insert_ngrams, learn_rates
from vllm_graft.spec_decode.kernels.ngram_match import match_ngrams
from vllm_graft.spec_decode.kernels.ngram_paths import insert_paths
from vllm_graft.spec_decode.trees.ngram_state import NgramState
from vllm_graft.spec_decode.trees.reference import reference_in

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.states import RequestState

    from vllm_graft.base.metric import Numbers
    from vllm_graft.spec_decode.config.ngram_config import NgramConfig
    from vllm_graft.spec_decode.trees.candidates import CandidateTable
    from vllm_graft.spec_decode.trees.reference import Reference


class Requests(Protocol):
    """The part of a drafter that n-grams read: int64 ``[>= R]`` request-state indices; -1 is
    padding."""

    idx_mapping: torch.Tensor


class ReferenceCounts:
    """Counts the references of an engine's requests, for the metrics."""

    def __init__(self) -> None:
        self.tokens = Counter(dict.fromkeys(REFERENCE_SOURCES, 0))
        self.declines = Counter(dict.fromkeys(REFERENCE_DECLINES, 0))

    def add(self, reference: Reference) -> None:
        self.tokens.update(reference.tokens)
        self.declines.update(reference.declines)

    def numbers(self) -> Numbers:
        return {"reference_tokens": dict(self.tokens), "reference_declines": dict(self.declines)}


class Ngrams:
    """An `Extra`: where the end of a text has occurred before, what came then may come again.

    The longest suffix of prompt and answer that has occurred before, or that the request's
    reference has, predicts the tokens that follow, a path down from the root. It needs no pass of
    the draft, so it may be deeper than the draft's levels. All of it happens on the device: two
    launches, which a CUDA graph may hold, and one more per step. Integers alone are added up, so
    that all ranks agree.

    Args:
        config: lengths of matches.
        max_reqs: most requests of a batch.
        width: most tokens of a text.
        matches: matches that are kept of each text.
        reference: tokens that the reference of a request may have; 0 for no references.

    Attributes:
        nodes: int64 ``[max_reqs]`` by request-state index, bits of nodes that n-grams alone
            brought.
        counts: int64 ``[2]``, how many such nodes were verified, and how many accepted.
    """

    def __init__(
        self,
        config: NgramConfig,
        max_reqs: int,
        width: int,
        vocab_size: int,
        device: torch.device,
        matches: int = 1,
        reference: int = 0,
    ) -> None:
        self.references = ReferenceCounts()
        self.state = NgramState.allocate(
            config.min, config.max, max_reqs, width, device, matches, reference
        )
        self._refers = [False] * max_reqs
        self.vocab_size = vocab_size
        self.nodes = torch.zeros(max_reqs, dtype=torch.int64, device=device)
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)
        self._published = torch.zeros(2, dtype=torch.int64, pin_memory=device.type == "cuda")

    def attach(self, req_states: RequestState) -> None:
        """Read the texts where the engine keeps them; both tensors have fixed addresses."""
        self._texts: torch.Tensor = req_states.all_token_ids.gpu
        self._lengths: torch.Tensor = req_states.total_len.gpu

    def begin(self, req_index: int, request: NewRequestData) -> None:
        """Note a new request of this index: its text is to be copied anew, and its reference."""
        self.state.notes[req_index].zero_()
        if not self.state.reference:
            return
        found = reference_in(request.sampling_params)
        self.references.add(found)
        # Most requests have none, and follow one that had none.
        if found.row or self._refers[req_index]:
            self.state.refer(req_index, found.row)
        self._refers[req_index] = bool(found.row)

    def columns(self, num_nodes: int) -> int:
        """A path may be all of a tree."""
        return num_nodes

    def add(
        self,
        candidates: CandidateTable,
        drafter: Requests,
        num_reqs: int,
        levels: int,
        *,
        first: int,
        num_nodes: int,
    ) -> None:
        """Put what followed the matches of each request into the table; see `Extra.add`."""
        slots = drafter.idx_mapping[:num_reqs]
        match_ngrams(self.state, self._texts, self._lengths, slots, num_reqs)
        self._insert(candidates, slots, num_reqs, levels=levels, first=first, num_nodes=num_nodes)

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
        insert_ngrams(
            candidates,
            self.state,
            self._lengths,
            slots,
            num_reqs,
            levels=levels,
            first=first,
            depth=self.columns(num_nodes),
            vocab_size=self.vocab_size,
        )

    def end_step(self) -> None:
        """Learn from a step; send the counts to the host, which does not wait for them."""
        learn_rates(self.state)
        self._published.copy_(self.counts, non_blocking=True)

    def numbers(self) -> Numbers:
        verified, accepted = self._published.tolist()
        return {
            "ngram_nodes_verified": verified,
            "ngram_nodes_accepted": accepted,
            **(self.references.numbers() if self.state.reference else {}),
        }

    def report(self) -> dict[str, Any]:
        """The part of ``graft_info()`` about it. This waits for the device."""
        verified, accepted = self.counts.tolist()
        rates = [round(rate, 4) for rate in self.state.rates.tolist()]
        lengths = range(self.state.min_n, self.state.max_n + 1)
        found = {
            "nodes_verified": verified,
            "nodes_accepted": accepted,
            "rates": {n: rates[n] for n in lengths},
            "bytes": self.state.num_bytes,
        }
        if self.state.reference:
            lengths = range(1, self.state.max_n + 1)
            found["reference_rates"] = {n: rates[self.state.lengths + n] for n in lengths}
        return found


class SeveralNgrams(Ngrams):
    """An `Extra` of several matches, where `Ngrams` has one beside what a draft model drafts.

    From each match at most `depth` tokens follow; all else is as in `Ngrams`.
    """

    def __init__(self, *args: Any, depth: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
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
