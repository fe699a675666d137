"""Numbers on which roundings differ, and torch's own e4m3."""

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST = 448.0


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Round ``values`` to e4m3 by torch, saturating; return codes as uint8."""
    return values.float().clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Return all 16-bit numbers, or float32 numbers around each e4m3 number and tie, and others."""
    if dtype is not torch.float32:
        return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    points = torch.cat([codes, ties]).view(torch.int32)
    near = torch.cat([points - 1, points, points + 1]).clamp(min=0).view(torch.float32)
    odd = torch.tensor([1e-45, 1e-38, 449.0, 464.0, 480.0, 1e30, float("inf"), float("nan")])
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(20_000, generator=generator) * 10 ** (
        torch.rand(20_000, generator=generator) * 8 - 5
    )
    found = torch.cat([near, odd, spread])
    found = torch.cat([found, -found])
    return found[: len(found) // 16 * 16]


def same_codes(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compare bit for bit, but for the sign of NaN, which not every cast of torch keeps."""
    nan = (expected & 0x7F) == 0x7F
    return torch.equal(found[~nan], expected[~nan]) and bool((found[nan] & 0x7F == 0x7F).all())


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compare bit for bit, but for the payload of NaN."""
    nan = expected.isnan()
    bits = torch.int32 if expected.dtype is torch.float32 else torch.int16
    values = found[~nan].view(bits), expected[~nan].view(bits)
    return bool(torch.equal(found.isnan(), nan) and torch.equal(*values))


def back(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert e4m3 codes to the device's type by torch."""
    return codes.view(torch.float8_e4m3fn).to(dtype)
