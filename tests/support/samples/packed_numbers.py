"""K/V as bits of bfloat16, and a packer that follows the format number by number."""

from pathlib import Path

import torch

from tests.support.engines.shipped_pair import SHIPPED

ROOT = Path(__file__).resolve().parents[3]
TOKENS = 1024
"""Tokens of a prompt of :func:`computed`."""


def every_number(seed: int = 0) -> torch.Tensor:
    """Return all 65,536 bit patterns, int16, so that neighbours have near exponents."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)
    place = (bits >> 7 & 0xFF) + 15.2 * torch.rand(len(bits), generator=generator)
    return bits[place.argsort()].to(torch.int16)


def usual(count: int, seed: int = 0) -> torch.Tensor:
    """The bits of ``count`` normal numbers, int16."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator).bfloat16().view(torch.int16)


def spread(count: int, seed: int = 0) -> torch.Tensor:
    """Any bits, of which no run fits."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 15), 1 << 15, (count,), generator=generator)
    return bits.to(torch.int16)


def packed(numbers: torch.Tensor) -> tuple[list[int], bool]:
    """The bytes of a run, and whether it fits."""
    bits = [number & 0xFFFF for number in numbers.tolist()]
    small = [(number >> 15) << 7 | number % 128 for number in bits]
    codes, largest, listed = [], [], []
    for start in range(0, len(bits), 64):
        exponents = [number // 128 % 256 for number in bits[start : start + 64]]
        largest.append(max([exponent for exponent in exponents if exponent < 255], default=0))
        for exponent in exponents:
            near = 0 <= largest[-1] - exponent < 15
            codes.append(largest[-1] - exponent if near else 15)
            listed += [] if near else [exponent]
    pairs = [low + 16 * high for low, high in zip(codes[::2], codes[1::2])]
    room = len(bits) // 32 - 1
    rest = listed[:room] + [0] * (room - len(listed))
    return [*small, *pairs, *largest, *rest, int(len(listed) > room)], len(listed) <= room


def computed(pages: int, seed: int = 0) -> torch.Tensor:
    """K/V that the shipped target computes of parts of our documentation: the bits of bfloat16,
    int16 ``[pages, layers, heads, 16, 2 * head_size]``, as a page of 16 tokens lies on a device."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = SHIPPED / "target"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    texts = [file.read_text() for file in sorted((ROOT / "docs").glob("*.md"))]
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)("".join(texts)).input_ids)
    generator = torch.Generator().manual_seed(seed)
    found: list[torch.Tensor] = []
    while sum(map(len, found)) < pages:
        begin = int(torch.randint(len(ids) - TOKENS, (1,), generator=generator))
        with torch.no_grad():
            layers = model(ids[None, begin : begin + TOKENS]).past_key_values.layers
        whole = torch.stack([torch.cat((each.keys, each.values), -1)[0] for each in layers])
        found.append(whole.unflatten(2, (-1, 16)).permute(2, 0, 1, 3, 4))
    return torch.cat(found)[:pages].contiguous().view(torch.int16)
