"""What a user may set for the ``segments`` store."""

from __future__ import annotations

from typing import Annotated

from pydantic import ByteSize, Field, model_validator

from vllm_graft.hicache.options import Bytes, Folder, Options

_MIB = 1 << 20


class SegmentsOptions(Options):
    """Keys beside ``"backend": "segments"``."""

    path: Folder
    """Directory, on a local disk; each namespace has a directory in it."""

    max_bytes: Annotated[Bytes, Field(ge=_MIB)]
    """Bytes that all segments in the directory may take: those of all namespaces, whoever has them
    open. See `neighbours`."""

    segment_bytes: Annotated[Bytes, Field(ge=64 << 10)] | None = None
    """Length of a data file; pages leave by whole files. None: 1/256 of ``max_bytes``, at least
    64 MiB, at most 1/8 of ``max_bytes``. At most half of ``max_bytes``."""

    sync_bytes: Annotated[Bytes, Field(ge=0)] = ByteSize(64 * _MIB)
    """Bytes that may be written and not durable: what a power failure may cost."""

    @model_validator(mode="after")
    def _two_segments(self) -> SegmentsOptions:
        if self.segment_bytes is not None and 2 * self.segment_bytes > self.max_bytes:
            raise ValueError(
                f"segment_bytes {int(self.segment_bytes)} is over half of max_bytes "
                f"{int(self.max_bytes)}"
            )
        return self

    @property
    def segment_size(self) -> int:
        """``segment_bytes``, or what stands for None."""
        if self.segment_bytes is not None:
            return int(self.segment_bytes)
        return min(max(64 * _MIB, self.max_bytes // 256), self.max_bytes // 8)
