"""The options of the ``segments`` store."""

from __future__ import annotations

from typing import Annotated

from pydantic import ByteSize, Field, model_validator

from vllm_graft.hicache.config.connector_options import Bytes, Folder, Options

_MIB = 1 << 20


class SegmentsOptions(Options):
    """Keys beside ``"backend": "segments"``."""

    path: Folder
    """Directory on a local disk, in which each namespace has its own directory."""

    max_bytes: Annotated[Bytes, Field(ge=_MIB)]
    """Most bytes that all segments in the directory may take: those of all namespaces, whichever
    process has them open. See `neighbours`."""

    segment_bytes: Annotated[Bytes, Field(ge=64 << 10)] | None = None
    """Most bytes per segment, at most half of ``max_bytes``. Pages are evicted by whole segments.
    None stands for 1/256 of ``max_bytes``, but at least 64 MiB and at most 1/8 of ``max_bytes``."""

    sync_bytes: Annotated[Bytes, Field(ge=0)] = ByteSize(64 * _MIB)
    """Bytes that may be written before they are made durable. A power failure may lose them."""

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
        """``segment_bytes``, or its default."""
        if self.segment_bytes is not None:
            return int(self.segment_bytes)
        return min(max(64 * _MIB, self.max_bytes // 256), self.max_bytes // 8)
