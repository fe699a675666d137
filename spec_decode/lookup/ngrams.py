"""N-grams of a request's own text as candidates beside the draft's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from vllm_graft.spec_decode.counts.tree_metrics import REFERENCE_DECLINES, REFERENCE_SOURCES
from vllm_graft.spec_decode.kernels.ngram_insert import (
    Learned,
    insert_ngrams,
    insert_paths,
    learn_rates,
)
from vllm_graft.spec_decode.kernels.ngram_match import match_ngrams
from vllm_graft.spec_decode.kernels.text_memory import (
    drop_corpus,
    search_memory,
    write_corpus,
    write_memory,
)
from vllm_graft.spec_decode.trees.text_state import (
    CLASSES,
    LONGEST,
    PROMPT_TOKENS,
    MemoryState,
    NgramState,
    reference_in,
)

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState

    from vllm_graft.base.metric import Numbers
    from vllm_graft.spec_decode.config.tree_config import MemoryConfig, NgramConfig
    from vllm_graft.spec_decode.trees.text_state import Reference
    from vllm_graft.spec_decode.trees.tree import CandidateTable

_COUNTED = (
    "ngram_nodes_verified",
    "ngram_nodes_accepted",
    "memory_nodes_verified",
    "memory_nodes_accepted",
)

REST = 8
"""Steps without drafts of which one adds to the memory what they have emitted. So few tokens are
lost where a request ends among them, and most of them launch nothing."""


class Requests(Protocol):
    """What n-grams read of a drafter: int64 ``[>= R]`` request-state indices; -1 is padding."""

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

    With a memory (`MemoryState`) the end of a text is looked for in the texts of other requests of
    its scope as well, by a launch more, and before that another one adds what was emitted. Both
    are in the graph. Steps without drafts add what they have emitted every `REST` steps.

    Args:
        config: lengths of matches.
        max_reqs: most requests of a batch.
        width: most tokens of a text.
        matches: matches that are kept of each text.
        reference: tokens that the reference of a request may have; 0 for no references.
        memory: of texts of other requests; None for none.
        depth: most tokens that follow from each of several matches, where no draft model drafts;
            None for one match beside a draft's levels.

    Attributes:
        nodes: int64 ``[max_reqs]`` by request-state index, bits of nodes that n-grams alone
            brought. With a memory ``[2, max_reqs]``: the second row is of those from there.
        counts: int64 ``[2]`` or ``[4]``: for each row how many such nodes were verified, how many
            accepted.
    """

    def __init__(
        self, config: NgramConfig, max_reqs: int, width: int, vocab_size: int, device: torch.device,
        matches: int = 1, reference: int = 0, memory: MemoryConfig | None = None,
        depth: int | None = None,
    ) -> None:  # fmt: skip
        self.references, self.depth = ReferenceCounts(), depth
        kept = None
        if memory is not None:
            kept = MemoryState.allocate(memory.bytes, max_reqs, device, memory.corpora_bytes)
        self.state = NgramState.allocate(
            config.min, config.max, max_reqs, width, device, matches, reference, kept
        )
        self._keeps_prompts = memory is not None and memory.prompts
        self._refers = [False] * max_reqs
        self._rested = 0
        self.vocab_size = vocab_size
        kinds = 1 if kept is None else 2
        size = (max_reqs,) if kept is None else (kinds, max_reqs)
        self.nodes = torch.zeros(size, dtype=torch.int64, device=device)
        self.counts = torch.zeros(2 * kinds, dtype=torch.int64, device=device)
        self._published = torch.zeros(
            2 * kinds, dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        state = self.state
        self.learned = Learned(state.pending, state.rates, self.counts, self._published)

    def attach(self, req_states: RequestState) -> None:
        """Read the texts where the engine keeps them; both tensors have fixed addresses."""
        self._texts: torch.Tensor = req_states.all_token_ids.gpu
        self._lengths: torch.Tensor = req_states.total_len.gpu
        if (memory := self.state.memory) is not None and memory.tokens.device.type != "meta":
            # Compile now what the first step would wait for; nobody's text is added.
            write_memory(memory, self._texts, self._lengths, memory.head[1:] - 1, 1)

    def begin(self, req_index: int, request: NewRequestData) -> None:
        """Note a new request of this index: its text is to be copied anew, and its reference."""
        self.state.notes[req_index].zero_()
        found = reference_in(request.sampling_params)
        if self.state.memory is not None:
            self.state.memory.begin(req_index, found.owner, self._first(request))
        if not self.state.reference:
            return
        self.references.add(found)
        # Most requests have none, and follow one that had none.
        if found.row or self._refers[req_index]:
            self.state.refer(req_index, found.row)
        self._refers[req_index] = bool(found.row)

    def _first(self, request: NewRequestData) -> int:
        """The first token of a text that a memory keeps: behind it an answer is found from its
        beginning on. What was emitted before a preemption is kept already."""
        known = request.prefill_token_ids or request.prompt_token_ids
        if known is None:
            # Embeddings are no tokens.
            return 0 if request.prompt_embeds is None else len(request.prompt_embeds)
        return max(0, len(known) - (PROMPT_TOKENS if self._keeps_prompts else LONGEST))

    def remember(self, batch: InputBatch, *, drafts: bool) -> None:
        """Add what steps without drafts have emitted; `add` does it in those with drafts."""
        if (memory := self.state.memory) is None:
            return
        memory.tell()
        self._rested = 0 if drafts else self._rested + 1
        if self._rested % REST == 1:
            num_reqs, slots = batch.num_reqs, batch.idx_mapping
            write_memory(memory, self._texts, self._lengths, slots, num_reqs)

    def columns(self, num_nodes: int) -> int:
        """A column for each token of each path: a path may be all of a tree."""
        return self.state.matches * min(self.depth or num_nodes, num_nodes)

    def add(
        self, candidates: CandidateTable, drafter: Requests, num_reqs: int, levels: int, *,
        first: int, num_nodes: int,
    ) -> None:  # fmt: skip
        """Put what followed the matches of each request into the table; see `Extra.add`."""
        slots = drafter.idx_mapping[:num_reqs]
        if self.state.memory is not None:
            write_memory(self.state.memory, self._texts, self._lengths, slots, num_reqs)
        match_ngrams(self.state, self._texts, self._lengths, slots, num_reqs)
        search_memory(self.state, self._lengths, slots, num_reqs)
        options: dict[str, Any] = {"first": first, "vocab_size": self.vocab_size}
        depth = min(self.depth or num_nodes, num_nodes)
        arguments = candidates, self.state, self._lengths, slots, num_reqs
        if self.depth is None:
            insert_ngrams(*arguments, levels=levels, depth=depth, **options)
        else:
            insert_paths(*arguments, depth=depth, **options)

    def end_step(self) -> None:
        """Learn from a step; send the counts to the host, which does not wait for them. Without a
        draft model the launch that begins the next step does both (`keep_slots`)."""
        if self.depth is None:
            learn_rates(self.learned)

    def numbers(self) -> Numbers:
        return {
            **dict(zip(_COUNTED, self._published.tolist(), strict=False)),
            **(self.references.numbers() if self.state.reference else {}),
        }

    def report(self) -> dict[str, Any]:
        """The part of ``graft_info()`` about it. This waits for the device."""
        verified, accepted, *of_memory = self.counts.tolist()
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
        if (memory := self.state.memory) is not None:
            found["memory"] = {
                "nodes_verified": of_memory[0],
                "nodes_accepted": of_memory[1],
                "rates": rates[2 * self.state.lengths :][1:CLASSES],
                "bytes": memory.num_bytes,
                "segments": memory.size,
                "segments_written": int(memory.head[0]) - 1,
            }
        return found


def add_corpus(worker: Any, *corpus: Any) -> None:
    """Runs in each worker, between two steps; see `write_corpus`."""
    write_corpus(_memory_of(worker), *corpus)


def erase_corpus(worker: Any, places: Sequence[int]) -> None:
    """Likewise; see `drop_corpus`."""
    drop_corpus(_memory_of(worker), places)


def _memory_of(worker: Any) -> MemoryState:
    found: MemoryState = worker.model_runner.speculator.trees.sources.ngrams.state.memory
    return found
