"""Whether fused blocks have the bits of the blocks themselves, on this GPU and these versions."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_graft.graph_runners.vision.fused import UNKNOWN_BLOCKS
from vllm_graft.graph_runners.vision.fused.blocks import FusedBlocks, find_blocks

ROWS = (64, 200, 784, 2048)
"""Patches of the trial batches; each has two segments, of one and of two thirds."""

Same = Callable[[torch.Tensor, torch.Tensor], bool]


def agreed_blocks(
    model: Any, same: Same = torch.equal, agree: Callable[[bool], bool] = bool
) -> FusedBlocks | str:
    """Fuse as many operators as keep the bits of a model's blocks, or say why nothing is fused.
    Compiles the kernels, runs some of the blocks on noise with and without them, and waits for the
    device. `agree` tells whether all ranks that share the tower say yes."""
    blocks = find_blocks(model)
    if blocks is None:
        return UNKNOWN_BLOCKS
    if blocks[0].norm1.weight.device.type != "cuda" and same is torch.equal:
        return "the device has no kernels of ours"
    sample = [*blocks[:2], *blocks[-1:]] if len(blocks) > 2 else blocks
    inputs = [_noise(blocks[0], rows) for rows in ROWS]
    expected = [_outputs(sample, *made) for made in inputs]
    for norms, gates in itertools.product((True, False), repeat=2):
        trial = FusedBlocks(sample, norms, gates)
        with trial.installed():
            found = [_outputs(sample, *made) for made in inputs]
        pairs = zip(itertools.chain(*found), itertools.chain(*expected), strict=True)
        if agree(all(same(ours, theirs) for ours, theirs in pairs)):
            return FusedBlocks(blocks, norms, gates)
    return "fused kernels have other bits than the blocks' own on this device"


def _outputs(
    blocks: Sequence[Any], x: torch.Tensor, attention: dict[str, Any]
) -> list[torch.Tensor]:
    found = []
    for block in blocks:
        x = block(x, **attention)
        found.append(x)
    return found


def _noise(block: Any, rows: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """Input of a block, ``[rows, 1, width]``, and the arguments of its attention."""
    weight = block.norm1.weight
    device, dtype = weight.device, weight.dtype
    generator = torch.Generator(device).manual_seed(rows)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    angles = 3 * noise(rows, block.attn.hidden_size_per_attention_head // 2)
    third = rows // 3
    attention = {
        "cu_seqlens": torch.tensor([0, third, rows], dtype=torch.int32, device=device),
        "rotary_pos_emb_cos": angles.cos().to(dtype),
        "rotary_pos_emb_sin": angles.sin().to(dtype),
        "max_seqlen": torch.tensor(rows - third, dtype=torch.int32),
        "sequence_lengths": None,
    }
    return (2 * noise(rows, 1, len(weight)) + 0.1).to(dtype), attention
