"""What stands under ``graft.vit``."""

from typing import Annotated

from pydantic import Field

from vllm_graft.base.options import Count, EntryName, GraftSection, Switch

NAME = "vit"

Patches = Annotated[Count, Field(ge=1, le=65536)]


class VitConfig(GraftSection):
    """Vision-encoder graphs. Given (even as ``{}``), they replace vLLM's own."""

    NAME = NAME

    runner: EntryName = "cuda_graph"
    """Name of a ``graft_vit_graph_runners`` entry."""

    memory: Count = Field(default=512, ge=32, le=65536)
    """MiB that the graphs may take, static buffers and pool together. vLLM's memory profile counts
    all of it. As much pinned host memory is taken for metadata of padded batches."""

    verify: Switch = True
    """Whether each graph's first replay is compared with the eager pass. A graph that differs is
    dropped for good, and ``graft_info()`` says why."""

    fuse: Switch | None = None
    """Whether norms with the additions before them, rotations and gates of the tower's blocks run
    as fewer kernels in graphs. None: where that gives the same bits, which is tried on noise at the
    start. True: the engine does not start where nothing can be fused."""

    min_hits: Count = Field(default=2, ge=1, le=1000)
    """Times that a layout is seen before it gets a graph of its own."""

    max_patches: Count | None = Field(default=None, ge=64, le=65536)
    """Patches of the largest graph, and above which one image runs eagerly. None: what fits into
    ``memory`` and is measured to pay when the engine starts, 8192 at most; 4096 at most where
    nothing is measured."""

    buckets: tuple[Patches, ...] | None = None
    """Patches of the padded graphs. None: steps of 1.25 from 128, of about 128 at most. An empty
    list: no padded graphs."""

    capture_share: float = Field(default=0.019, ge=0, le=1)
    """Most of the wall time since the start that captures may take while serving. 0: at the start
    only. 1: as they come."""
