"""Static buffers that graphs share: each replay writes them anew, so one set serves all graphs."""

from __future__ import annotations

import torch

Kind = tuple[str, torch.dtype, tuple[int, ...]]


class Arena:
    """Hands out the first rows of a buffer; there is one per name, dtype and shape of a row.

    A buffer that is too small is replaced; graphs that were captured with it keep it alive.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[Kind, torch.Tensor] = {}
        self._outgrown: list[int] = []

    @property
    def bytes(self) -> int:
        """Bytes of all buffers, including replaced ones."""
        return sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each buffer, including replaced ones, which graphs may still hold."""
        return [*self._outgrown, *(int(buffer.nbytes) for buffer in self._buffers.values())]

    def missing(self, name: str, rows: int, like: torch.Tensor) -> int:
        """Bytes that :meth:`rows` would allocate for the same arguments."""
        buffer = self._buffers.get(_kind(name, like))
        if buffer is not None and buffer.shape[0] >= rows:
            return 0
        return rows * int(like[:1].nbytes) if like.shape[0] else 0

    def rows(self, name: str, rows: int, like: torch.Tensor) -> torch.Tensor:
        """A buffer ``[rows, *like.shape[1:]]`` of `like`'s dtype; a new one is zero."""
        kind = _kind(name, like)
        buffer = self._buffers.get(kind)
        if buffer is None or buffer.shape[0] < rows:
            if buffer is not None:
                self._outgrown.append(int(buffer.nbytes))
            buffer = torch.zeros(rows, *like.shape[1:], dtype=like.dtype, device=self._device)
            self._buffers[kind] = buffer
        return buffer[:rows]

    def clear(self) -> None:
        self._buffers.clear()
        self._outgrown.clear()


def _kind(name: str, like: torch.Tensor) -> Kind:
    return name, like.dtype, tuple(like.shape[1:])
