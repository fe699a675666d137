"""Which operators of a tower's blocks are fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_graft.base.errors import SeamError
from vllm_graft.graph_runners.vision.fused import PART
from vllm_graft.seams.compare import require_seams

if TYPE_CHECKING:
    from vllm_graft.graph_runners.vision.capture.graph_backend import Beside
    from vllm_graft.graph_runners.vision.fused.blocks import FusedBlocks


def fused_blocks(
    model: Any, beside: Callable[[], Beside | None], agree: Callable[[bool], bool]
) -> FusedBlocks | str:
    """Fuse as many operators of a model's vision blocks as keep their bits.

    Runs blocks on noise, and waits for the device. Never raises: a vLLM that differs from the
    ledger, for example, only means that the blocks run as they are.

    Args:
        model: the loaded model.
        beside: gives a second stream; called only if there is work to run beside the blocks.
        agree: tells whether all ranks that share the tower say yes.

    Returns:
        the fused blocks, or why nothing is fused.
    """
    try:
        require_seams(PART)
        from vllm_graft.graph_runners.vision.fused.aside import find_aside
        from vllm_graft.graph_runners.vision.fused.bit_check import agreed_blocks

        found = agreed_blocks(model, agree=agree)
        if not isinstance(found, str):
            found.aside = find_aside(model, beside)
        return found
    except SeamError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
