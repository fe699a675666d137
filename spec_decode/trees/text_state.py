"""What is kept of the requests' texts to find n-grams in them, and how references travel."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

SEGMENT = 64
"""Tokens of a segment. No tree is deeper, and no match is longer: what belongs to a place is in its
segment, the one before, or the one behind."""

WAYS = 8
"""Occurrences that are kept of what has the same hash."""

LENGTHS = (8, 5, 3, 1)
"""Tokens that each index looks up, the longest first."""

SAME_PROMPT = 3
"""The index that is of answers to the same prompt alone. These are likely to repeat each other, so
that one token is enough, whatever the least length of other matches is."""

LONGEST = max(LENGTHS)

PROMPT_TOKENS = 1024
"""Tokens of a prompt's end that are kept at most, where prompts are: an answer waits for them, as
each step adds a segment of a text."""

CLASSES = 49
"""Kinds of matches in a memory, each with a rate; 0 is none. See `search_memory`."""

_SHARES, _SIZES = (0.3, 0.55, 0.85, 0.95), (1, 3, 5, 8)

SEGMENT_BYTES = SEGMENT * (4 + 8 * len(LENGTHS)) + 5 * 8
"""Bytes of a segment with its part of the index."""


@dataclass
class MemoryState:
    """A ring of texts with an index, and corpora behind it. CUDA graphs may hold the addresses.

    A text is a list of segments, which are given out in the ring's order; the newest one replaces
    the oldest. Segments are counted from 1 on by their *serials*. The address of a token is its
    segment's serial times `SEGMENT`, plus its place there: addresses only grow, and those of
    replaced segments are told from others by their serials alone.

    The index is a table of hashes without probing. The address of each token is put to where the
    hash of the `LENGTHS` tokens before it leads, into one of `WAYS` cells, which one its segment
    decides: cells hold a sample of the recent occurrences in different segments, in which frequent
    continuations are frequent. A cell keeps the largest address, so that the order in which
    programs write does not matter, and all ranks agree. A cell proves nothing: whoever reads it
    compares the very tokens and the scope.

    Corpora have segments and cells of their own, which no answer replaces. Each corpus added has
    larger serials than those before it; the rest of a serial's division by `corpora` is the
    segment. A corpus is dropped by taking the scope from its segments.

    Attributes:
        size: segments of the ring.
        tokens: i32 ``[size + corpora, SEGMENT]``, `BORDER` behind the end of a text.
        segments: i64 ``[size + corpora, 5]``: scope and prompt of its text, serial of the segment
            before, row of the one behind plus 1, number of the request; 0 for none.
        cells: i64 ``[buckets, WAYS]``, addresses; 0 for none. Those of corpora are behind.
        owners: i64 ``[max_reqs, 4]`` by request-state index: scope and prompt, the first token that
            is kept, and the number of the request, which no other one has.
        writers: i64 ``[max_reqs, 5]``, likewise: the first place of its text that is here without a
            gap, the place up to which it is here, the serial of its last segment (0 for none), the
            tokens in that, and the number of the request that all this is of.
        head: i64 ``[2]``: the next serial, and programs of a launch that are done.
        begun: ``owners`` as the host knows them.
    """

    size: int
    tokens: torch.Tensor
    segments: torch.Tensor
    cells: torch.Tensor
    owners: torch.Tensor
    writers: torch.Tensor
    head: torch.Tensor
    begun: np.ndarray
    is_told: bool = True

    @classmethod
    def allocate(
        cls, max_bytes: int, max_reqs: int, device: torch.device | str, corpora: int = 0
    ) -> MemoryState:
        """The largest memory of so many bytes, and of so many for corpora."""
        size = (max_bytes - bytes_of(0, max_reqs)) // SEGMENT_BYTES

        def zeros(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        count = size + corpora // SEGMENT_BYTES
        return cls(
            size, tokens=torch.zeros(count, SEGMENT, dtype=torch.int32, device=device),
            segments=zeros(count, 5), cells=zeros(count * SEGMENT * len(LENGTHS) // WAYS, WAYS),
            owners=zeros(max_reqs, 4), writers=zeros(max_reqs, 5),
            head=torch.tensor([1, 0], device=device), begun=np.zeros((max_reqs, 4), dtype=np.int64),
        )  # fmt: skip

    def begin(self, slot: int, owner: Owner, first: int) -> None:
        """Let a slot's text be another one, from the token number ``first`` on, at `tell`."""
        self.begun[slot] = (*owner, first, self.begun[:, 3].max() + 1)
        self.is_told = False

    def tell(self) -> None:
        """Tell the device of all texts that were begun, behind what it was asked to do before."""
        if self.is_told:
            return
        self.is_told = True
        # The host does not wait for the copy, which keeps what it reads until it has been made.
        rows = torch.from_numpy(self.begun)
        self.owners.copy_(rows.pin_memory() if self.owners.is_cuda else rows, non_blocking=True)

    @property
    def corpora(self) -> int:
        """Segments of corpora."""
        return len(self.tokens) - self.size

    @property
    def num_bytes(self) -> int:
        """Device bytes."""
        on_device = (self.tokens, self.segments, self.cells, self.owners, self.writers, self.head)
        return sum(each.nbytes for each in on_device)


def bytes_of(segments: int, max_reqs: int) -> int:
    """Bytes of a memory of so many segments; each request needs two."""
    return 8 * (9 * max_reqs + 2) + segments * SEGMENT_BYTES


def first_rates() -> Sequence[float]:
    """Rates of the `CLASSES`, until texts are seen."""
    by_length = [(1 - 1 / (n + 1)) * share for n in _SIZES for share in _SHARES]
    return [0.5, *by_length, *by_length, *by_length]


KEY = "graft_prediction"
"""The key of ``SamplingParams.extra_args``, which are ``vllm_xargs`` in a request over HTTP."""


class Owner(NamedTuple):
    """Whose text a request's is in a memory: numbers of 63 bits, 0 for nobody, whose text is not
    kept and finds nothing. `scope`: requests of one scope read each other's texts, and nobody
    else's. `prompt`: requests with the same prompt have the same one."""

    scope: int
    prompt: int


NOBODY = Owner(0, 0)


class Reference(NamedTuple):
    """What is known beforehand of a request's answer.

    The engine core puts it in the place of the prediction in the request's parameters, so that all
    ranks get the same one with the request. No request can hold one itself: JSON has no such type.

    Attributes:
        row: int32 tokens with a `BORDER` between pieces, the likeliest piece at the end.
        tokens: tokens by source, for the metrics.
        declines: reasons why there is none, or not all of it.
        teaches: whether what is learned from texts may count this request's.
        owner: whose text the request's is in a memory.
    """

    row: Sequence[int] = array("i")
    tokens: Mapping[str, int] = {}
    declines: tuple[str, ...] = ()
    teaches: bool = True
    owner: Owner = NOBODY


NONE = Reference()
UNREAD = Reference(declines=("off",))
"""Stands for the prediction of a request where nothing reads it."""


def reference_in(params: SamplingParams | None) -> Reference:
    """The reference that came with a request's parameters."""
    found = None if params is None else (params.extra_args or {}).get(KEY)
    return found if isinstance(found, Reference) else NONE


MAX_PLACE = 2**25
"""Most tokens of a text with its reference: with a length of up to 32 a match's key is an int32."""

BORDER = -(1 << 30)
"""What stands in a reference between its pieces and behind them. No token of a text equals it."""


def scan_block(width: int) -> int:
    """Tokens that one program looks through, a power of two, for texts of up to `width` tokens."""
    return min(2048, 1 << (width - 1).bit_length())


@dataclass(frozen=True)
class NgramState:
    """Texts, matches and learned rates. Addresses are stable, so CUDA graphs may hold them.

    Attributes:
        min_n: shortest match, in tokens.
        max_n: longest match that is told from shorter ones.
        matches: matches that are kept of each text.
        reference: tokens that a request's reference may have. A reference is a second text, in
            which the end of the first is looked for as well. It is pieces with a `BORDER` between
            two, and no match or continuation goes across one.
        history: i32 ``[max_reqs, width + reference]`` by request-state index, copies of the texts,
            then the references, filled up with `BORDER`.
        notes: i32 ``[max_reqs, 4]`` by request-state index: tokens of the text that are copied,
            then of the last match the place of its next token, its length (0 for none), and the
            tokens that the text had. Zeros for a new request.
        keys: i32 ``[max_reqs, blocks * matches]`` by batch row, the best matches of each block of
            the text, best first: its length, then `MAX_PLACE`'s bits for the place of its last
            token; 0 for none.
        pending: i32 ``[rates, 2]`` by match length, predicted tokens and how many of them came
            true, since rates were learned.
        rates: f32 ``[rates]`` by match length: how often the next token is that of the match. It
            has `lengths` entries for matches in texts, then as many for those in references. With a
            memory the other half of it is by the class of matches there.
        memory: texts of other requests, whose places are counted behind the history's columns.
        sources: i32 ``[max_reqs]`` by batch row, the bits of the paths that are from the memory.
    """

    min_n: int
    max_n: int
    matches: int
    reference: int
    history: torch.Tensor
    notes: torch.Tensor
    keys: torch.Tensor
    pending: torch.Tensor
    rates: torch.Tensor
    memory: MemoryState | None = None
    sources: torch.Tensor | None = None

    @classmethod
    def allocate(
        cls, min_n: int, max_n: int, max_reqs: int, width: int, device: torch.device | str,
        matches: int = 1, reference: int = 0, memory: MemoryState | None = None,
    ) -> NgramState:  # fmt: skip
        """State for at most ``max_reqs`` requests of at most ``width`` tokens. Raises `ValueError`
        if a text with its reference has more than `MAX_PLACE` tokens."""
        columns = width + reference
        if columns > MAX_PLACE:
            raise ValueError(
                f"a text with its reference has at most {MAX_PLACE} tokens, not {columns}"
            )

        def zeros(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        count = _lengths(max_n, memory)
        # A guess, until texts are seen: the longer a match, the more surely it goes on.
        lengths = torch.arange(count, dtype=torch.float32, device=device)
        if reference or memory is not None:
            lengths = lengths.repeat(2)
        rates = 1 - 1 / (lengths + 1).clamp(min=2)
        if memory is not None:
            rates = torch.cat((rates, torch.full_like(rates, 0.5)))
            rates[2 * count : 2 * count + CLASSES] = torch.tensor(first_rates())
        # What a memory and its corpora have is found by a program each.
        parts = 0 if memory is None else 1 + (memory.corpora > 0)
        history = zeros(max_reqs, columns)
        history[:, width:] = BORDER
        return cls(
            min_n, max_n, matches, reference, history=history, notes=zeros(max_reqs, 4),
            keys=zeros(max_reqs, matches * (-(-columns // scan_block(columns)) + parts)),
            pending=zeros(len(rates), 2), rates=rates, memory=memory,
            sources=None if memory is None else zeros(max_reqs),
        )  # fmt: skip

    def refer(self, slot: int, tokens: Sequence[int]) -> None:
        """Give a slot another reference; what is more than ``reference`` tokens is left out."""
        row = torch.from_numpy(np.asarray(tokens[: self.reference], dtype=np.int32))
        if self.history.device.type == "cuda":
            # The host does not wait for the copy, which keeps the row until it has been made.
            row = row.pin_memory()
        end = self.width + len(row)
        self.history[slot, self.width : end].copy_(row, non_blocking=True)
        # The device fills the rest: the host's work is that of the tokens alone.
        self.history[slot, end:].fill_(BORDER)

    @property
    def width(self) -> int:
        return int(self.history.shape[1]) - self.reference

    @property
    def lengths(self) -> int:
        """Rates of one kind: a power of two, more than `max_n`."""
        return _lengths(self.max_n, self.memory)

    @property
    def remembered(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The tokens of the memory, and its segments."""
        memory = self.memory
        return (None, None) if memory is None else (memory.tokens, memory.segments)

    @property
    def num_bytes(self) -> int:
        """Device bytes; those of the memory are its own."""
        tensors = (self.history, self.notes, self.keys, self.pending, self.rates, self.sources)
        return sum(each.nbytes for each in tensors if each is not None)


def _lengths(max_n: int, memory: MemoryState | None) -> int:
    """Twice as many rates hold the classes of matches in a memory."""
    return max(1 << max_n.bit_length(), 0 if memory is None else 32)
