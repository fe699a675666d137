"""K/V in bfloat16 as 12.4 bits a number, without loss.

A bfloat16 has a sign, 8 bits of exponent, and 7 of mantissa. Of 64 neighbours, which are about a
head's K or V of a token, nearly all exponents are less than 15 below the largest finite one. So a
number keeps sign and mantissa, a byte, and the distance of its exponent from that one, four bits.
The code 15 says that it is that far away or further; it *escapes*, and lies in a list. A run of
``n`` numbers, ``n`` a multiple of 64, is ``99 * n / 64`` bytes::

    n            sign and mantissa
    n / 2        codes of two numbers, the first in the lower bits
    n / 64       the largest finite exponent of each 64 numbers
    n / 32 - 1   the exponents that escape, in the order of their numbers, then zeros
    1            0, or 1 if more escape than the list holds: then the run does not fit

Equal K/V has equal bytes. The largest share of escapes in a page and layer of Qwen2.5-Coder-1.5B is
0.5 %, and its mean 0.04 %. A table of the 15 most frequent exponents of a page (SplitZip, arXiv
2605.01708) would have 2.0 % and 0.14 %, because K and V of all heads share it."""

import numpy as np
import numpy.typing as npt
import torch

from vllm_graft.hicache.copies.copy_engine import elements_at
from vllm_graft.hicache.copies.strided import RangeCopy
from vllm_graft.hicache.messages.operation import Direction
from vllm_graft.hicache.pages.host_form import PACKED
from vllm_graft.hicache.pages.layout import Copies

ESCAPE = 15
"""The code of an exponent that is in the list, and the least distance of such a one."""

NOT_FINITE = 255
"""The exponent of infinities and NaN."""


def pack(numbers: torch.Tensor) -> torch.Tensor:
    """Pack a run: int16 ``[n]``, the bits of bfloat16, to uint8 ``[99 * n / 64]``."""
    bits = numbers.int() & 0xFFFF
    exponents = (bits >> 7 & 0xFF).view(-1, PACKED.unit)
    largest = exponents.where(exponents < NOT_FINITE, 0).amax(1, keepdim=True)
    # Infinities and NaN are above the largest: they are made far away.
    distances = (largest - exponents).flatten() & 0xFFFF
    codes = distances.clamp(max=ESCAPE).view(-1, 2)
    escaped = exponents.flatten()[distances >= ESCAPE]
    listed = escaped.new_zeros(len(bits) // 32)
    listed[-1] = len(escaped) >= len(listed)
    escaped = escaped[: len(listed) - 1]
    listed[: len(escaped)] = escaped
    parts = (
        bits >> 8 & 0x80 | bits & 0x7F,
        codes[:, 0] | codes[:, 1] << 4,
        largest.flatten(),
        listed,
    )
    return torch.cat(parts).to(torch.uint8)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`pack` for a run that fits: uint8 to int16."""
    count = len(packed) // PACKED.unit_bytes * PACKED.unit
    lengths = [count, count // 2, count // 64, count // 32]
    small, pairs, largest, listed = packed.int().split(lengths)
    codes = torch.stack((pairs & 15, pairs >> 4), 1).flatten()
    exponents = (largest[:, None] - codes.view(-1, PACKED.unit)).flatten()
    escaped = codes == ESCAPE
    place = (escaped.cumsum(0) - 1).clamp(0, len(listed) - 1)
    exponents = torch.where(escaped, listed[place], exponents)
    return ((small & 0x80) << 8 | exponents << 7 | small & 0x7F).to(torch.int16)


def packed_copy(runs: Copies, direction: Direction) -> RangeCopy:
    """Prepare copies by the CPU between bfloat16 on the device and packed runs on the host. The
    sizes of the runs are bytes on the host."""

    def copy(begin: int, end: int) -> None:
        columns = (column[begin:end].tolist() for column in (runs.device, runs.host, runs.sizes))
        for device, host, size in zip(*columns):
            numbers = elements_at(device, size // PACKED.unit_bytes * PACKED.unit, torch.int16)
            packed = elements_at(host, size, torch.uint8)
            if direction is Direction.STORE:
                packed.copy_(pack(numbers))
            else:
                numbers.copy_(unpack(packed))

    return copy


def unfit(runs: Copies) -> npt.NDArray[np.bool_]:
    """Whether runs on the host do not fit, bool ``[n]``. Their store has to have ended."""
    marks = runs.host + runs.sizes - 1
    first = int(marks.min())
    memory = elements_at(first, int(marks.max()) - first + 1, torch.uint8).numpy()
    found: npt.NDArray[np.bool_] = memory[marks - first] != 0
    return found
