"""What of a tower's blocks is fused."""

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
    """The blocks of a model's tower with as much fused as keeps their bits, or why nothing is.

    Runs blocks on noise, and waits for the device. Another vLLM than the ledger's is no error: what
    is fused here is only what a block does anyway.

    Args:
        model: loaded.
        beside: is asked for where there is something to run beside the blocks.
        agree: whether it is so on all ranks that share the tower.
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
