"""Compares a graph's embeddings with those of the eager pass."""

from collections.abc import Sequence

import torch

TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 3e-2}
"""The relative error that is allowed, by dtype. Kernels of a padded batch sum in another order,
which costs less. Wrong metadata cost far more."""


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference, divided by the norm of `expected`."""
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))


def same_bits(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether all embeddings are equal; NaN equals NaN. Waits for the device."""
    pairs = zip(found, expected, strict=True)
    return all(ours.allclose(theirs, rtol=0, atol=0, equal_nan=True) for ours, theirs in pairs)


def disagreement(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str | None:
    """How embeddings differ from the expected ones, ``[tokens, hidden]`` per item, in a sentence.
    None if shapes and dtypes agree and errors are within `TOLERANCE`. Waits for the device."""
    if len(found) != len(expected):
        return f"{len(found)} items instead of {len(expected)}"
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return (
                f"item {index} is {list(ours.shape)} {ours.dtype}, not "
                f"{list(theirs.shape)} {theirs.dtype}"
            )
        if not ours.isfinite().all() and theirs.isfinite().all():
            return f"item {index} is not finite"
        error = relative_error(ours, theirs)
        # `error > ...` would accept an error that is NaN.
        if not error <= TOLERANCE.get(ours.dtype, 3e-2):
            return f"item {index} has a relative error of {error:.3g}"
    return None
