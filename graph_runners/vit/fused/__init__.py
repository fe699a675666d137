"""A vision block's small operators as fewer kernels, with the bits of the operators themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_graft.errors import SeamError

if TYPE_CHECKING:
    from vllm_graft.graph_runners.vit.fused.blocks import FusedBlocks

PART = "fused"
"""Of the ledger."""


def fused_blocks(model: Any) -> FusedBlocks | str:
    """The blocks of a model's tower with as much fused as keeps their bits, or why nothing is.

    Runs blocks on noise, and waits for the device. Another vLLM than the ledger's is no error: what
    is fused here is only what a block does anyway.
    """
    from vllm_graft.seams import require_seams

    try:
        require_seams(PART)
        from vllm_graft.graph_runners.vit.fused.check import agreed_blocks

        return agreed_blocks(model)
    except SeamError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
