"""Inputs of recurrent layers that stay until a path is accepted, in place of a state per node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class LayerInputs(NamedTuple):
    """What a recurrent layer keeps of the rows of a pass.

    Attributes:
        rows: ``[max_rows, features]``, what is behind the convolution, of the layer's dtype.
            Features of a delta rule are ``2 * key_heads * K + value_heads * V`` queries, keys and
            values, those of Mamba-2 ``heads * P + 2 * groups * N`` inputs, ``B`` and
            ``C``.
        gates: f32 ``[max_rows, gates, heads]``. Gates of the gated delta rule are decays before
            the softplus and betas before the sigmoid, the one of Mamba-2 is steps before the
            softplus. Of Kimi delta attention they are ``K + 1``: a row's memory has ``heads * K``
            logarithms of decays, then ``heads`` betas behind the sigmoid.
    """

    rows: torch.Tensor
    gates: torch.Tensor

    @classmethod
    def allocate(
        cls,
        max_rows: int,
        features: int,
        gates: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> LayerInputs:
        """Allocate for `max_rows` rows of so many features, and gates of so many heads."""
        rows = torch.zeros(max_rows, features, dtype=dtype, device=device)
        return cls(rows, torch.zeros(max_rows, *gates, device=device))

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return int(self.rows.nbytes) + int(self.gates.nbytes)


@dataclass(frozen=True)
class KeptRows:
    """Which requests of a pass have left inputs in place of states, and where.

    Addresses are stable, so CUDA graphs may hold them.

    Attributes:
        firsts: i32 ``[max_tokens]``, at the first row of a request in the batch: the first of its
            rows in the layers' buffers, or -1 if its states were written in the pass.
        accepted: i32 ``[max_tokens]``, at the first row of a request in the batch: its state is in
            column ``accepted - 1``.
        masks: i64 ``[max_rows]``; bit ``j`` is set if a row of the buffers continues the ``j``-th
            row of its request, or is it.
    """

    firsts: torch.Tensor
    accepted: torch.Tensor
    masks: torch.Tensor

    @property
    def max_rows(self) -> int:
        """Rows of a buffer."""
        return len(self.masks)

    @classmethod
    def allocate(cls, max_tokens: int, max_rows: int, device: torch.device | str) -> KeptRows:
        """Allocate for batches of `max_tokens` rows, `max_rows` of which may be kept."""
        firsts, accepted = torch.full((2, max_tokens), -1, dtype=torch.int32, device=device)
        masks = torch.zeros(max_rows, dtype=torch.int64, device=device)
        return cls(firsts, accepted, masks)
