"""Weights of a draft as they are in fewer bits, computed in float32."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

FORMATS = "as-loaded, fp8, int4:GROUP or int4-search:GROUP, such as int4:128"
_INT4_LARGEST = 7
_FP8_LARGEST = 448.0
_SHRINKS = [1 - step / 40 for step in range(20)]
"""Factors of a group's scale that the search tries, from 1 down to about a half."""

Rounding = Callable[[Tensor], Tensor]


def read_format(text: str) -> tuple[str, Rounding]:
    """Read a name of `FORMATS`; returns it with what it does to a matrix ``[outputs, inputs]``.

    - ``fp8``: e4m3 with one scale per output, as ``fp8_per_channel`` stores weights;
    - ``int4:GROUP``: whole numbers from -7 to 7 with one scale per output and group of inputs, to
      the nearest; vLLM's Marlin kernels read such weights;
    - ``int4-search:GROUP``: the same, with the scale of each group whose squared error is least.

    Raises:
        argparse.ArgumentTypeError: there is no such format.
    """
    if text == "as-loaded":
        return text, lambda weight: weight
    if text == "fp8":
        return text, _fp8
    found = re.fullmatch(r"int4(-search)?:([1-9]\d*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: say {FORMATS}")
    group, shrinks = int(found[2]), _SHRINKS if found[1] else [1.0]
    return text, lambda weight: _int4(weight, group, shrinks)


def coarse(weights: Mapping[str, Tensor], rounding: Rounding) -> dict[str, Tensor]:
    """Round all matrices of a draft that products read; embeddings and norms stay."""
    return {
        name: rounding(weight) if weight.ndim == 2 and "embed" not in name else weight
        for name, weight in weights.items()
    }


def _fp8(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / _FP8_LARGEST
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


def _int4(weight: Tensor, group: int, shrinks: list[float]) -> Tensor:
    outputs, inputs = weight.shape
    # The last group may have fewer inputs.
    grouped = F.pad(weight, (0, -inputs % group)).reshape(outputs, -1, group)
    largest = grouped.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    best, error = grouped, torch.full_like(largest, torch.inf)
    for shrink in shrinks:
        scale = largest * shrink / _INT4_LARGEST
        tried = (grouped / scale).round().clamp(-_INT4_LARGEST, _INT4_LARGEST) * scale
        missed = (tried - grouped).square().sum(-1, keepdim=True)
        better = missed < error
        best, error = torch.where(better, tried, best), torch.where(better, missed, error)
    return best.reshape(outputs, -1)[:, :inputs]
