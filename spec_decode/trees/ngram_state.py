"""What is kept of the requests' texts to find n-grams in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_graft.spec_decode.trees.memory_state import CLASSES, MemoryState, first_rates

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
        cls,
        min_n: int,
        max_n: int,
        max_reqs: int,
        width: int,
        device: torch.device | str,
        matches: int = 1,
        reference: int = 0,
        memory: MemoryState | None = None,
    ) -> NgramState:
        """State for at most ``max_reqs`` requests of at most ``width`` tokens.

        Raises:
            ValueError: if a text with its reference has more than `MAX_PLACE` tokens, or the
                memory beside it, or the lengths are not 1 to 32.
        """
        if not 1 <= min_n <= max_n <= 32:
            raise ValueError(f"lengths of matches must be within 1 and 32, got {min_n} to {max_n}")
        columns = width + reference
        if columns > MAX_PLACE:
            raise ValueError(
                f"a text with its reference has at most {MAX_PLACE} tokens, not {columns}"
            )
        if memory is not None and columns + memory.tokens.numel() > MAX_PLACE:
            raise ValueError(
                f"a text and the memory have at most {MAX_PLACE} tokens, not "
                f"{columns + memory.tokens.numel()}"
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
            min_n,
            max_n,
            matches,
            reference,
            history=history,
            notes=zeros(max_reqs, 4),
            keys=zeros(max_reqs, matches * (-(-columns // scan_block(columns)) + parts)),
            pending=zeros(len(rates), 2),
            rates=rates,
            memory=memory,
            sources=None if memory is None else zeros(max_reqs),
        )

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
