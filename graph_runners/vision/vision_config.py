"""What stands under ``graft.vit``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from vllm_graft.base.options import Count, EntryName, Section, section_in

NAME = "vit"

Patches = Annotated[Count, Field(ge=1, le=65536)]


class VitConfig(Section):
    """Vision-encoder graphs. Given (even as ``{}``), they replace vLLM's own."""

    runner: EntryName = "cuda_graph"
    """Name of a ``graft_vit_graph_runners`` entry."""

    memory: Count = Field(default=512, ge=32, le=65536)
    """MiB that the graphs may take, static buffers and pool together."""

    verify: bool = True
    """Whether each graph's first replay is compared with the eager pass."""

    fuse: bool | None = None
    """Whether norms, rotations and gates of the tower's blocks run as fewer kernels in graphs. None
    is where that has the same bits, which is tried at the start; true refuses to start without."""

    min_hits: Count = Field(default=2, ge=1, le=1000)
    """Times that a layout is seen before it gets a graph of its own."""

    max_patches: Count | None = Field(default=None, ge=64, le=65536)
    """Patches of the largest graph; None is what fits and pays, 8192 at most."""

    buckets: tuple[Patches, ...] | None = None
    """Patches of the padded graphs; None is steps of 1.25, an empty list none."""

    capture_share: float = Field(default=0.019, ge=0, le=1)
    """Most of the wall time that captures may take while serving; 0: at the start only, 1: all."""

    @classmethod
    def from_vllm(cls, vllm_config: Any) -> VitConfig | None:
        """The section of a configuration; None where it is not given.

        Raises:
            ConfigError: for a wrong key or value.
        """
        return section_in(vllm_config, NAME, cls)
