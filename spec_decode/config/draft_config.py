"""What stands under ``graft.draft``."""

from vllm_graft.base.options import EntryName, GraftSection, Switch

NAME = "draft"


class DraftConfig(GraftSection):
    """Graphs of a standalone draft model (``method: draft_model``). Given (even as ``{}``), the
    loop over it runs as CUDA graphs."""

    NAME = NAME

    extend: Switch = True
    """Whether the first pass, over the tokens that were accepted, is captured as well, where the
    attention backend is FLASH_ATTN or TRITON_ATTN."""

    graph_runner: EntryName = "cuda_graph"
    """Name of a ``graft_draft_graph_runners`` entry, as of ``graft.tree.graph_runner``."""
