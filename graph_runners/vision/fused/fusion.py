"""Which operators of a tower's blocks are fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_graft.base.errors import SeamError
from vllm_graft.graph_runners.vision.fused import PART
from vllm_graft.seams.compare import require_seams

if TYPE_CHECKING:
    from vllm_graft.graph_runners.vision.capture.graph_backend import SideStream
    from vllm_graft.graph_runners.vision.fused.blocks import FusedBlocks


def fused_blocks(
    model: Any, side_stream: Callable[[], SideStream | None], agree: Callable[[bool], bool]
) -> FusedBlocks | str:
    """Fuse as many operators of a model's vision blocks as keep their bits.

    Runs blocks on noise, and waits for the device. Never raises: a vLLM that differs from the
    ledger, for example, only means that the blocks run as they are.

    Args:
        model: the loaded model.
        side_stream: gives a second stream; called only if there is work to run beside the blocks.
        agree: tells whether all ranks that share the tower say yes.

    Returns:
        the fused blocks, or why nothing is fused.
    """
    try:
        require_seams(PART)
        from vllm_graft.graph_runners.vision.fused.bit_check import agreed_blocks
        from vllm_graft.graph_runners.vision.fused.side_mergers import find_side_mergers

        found = agreed_blocks(model, agree=agree)
        if not isinstance(found, str):
            found.mergers = find_side_mergers(model, side_stream)
        return found
    except SeamError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
