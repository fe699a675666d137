"""What stands under ``graft.draft``."""

from vllm_graft.base.options import EntryName, GraftSection

NAME = "draft"


class DraftConfig(GraftSection):
    """Graphs of a standalone draft model (``method: draft_model``). Given (even as ``{}``), the
    loop over it runs as CUDA graphs."""

    NAME = NAME

    extend: bool = True
    """Whether the first pass, over the tokens that were accepted, is captured as well, where the
    attention backend is FLASH_ATTN or TRITON_ATTN."""

    graph_runner: EntryName = "cuda_graph"
    """Name of a ``graft_draft_graph_runners`` entry. ``cuda_graph`` pads batches to the next
    captured size; ``verify`` compares the first replay of each size with launches, and gives a size
    that differs no graph (``graft_info()`` lists both); ``eager`` captures nothing."""
