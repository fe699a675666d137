"""Vision blocks with fewer kernels, which replace the blocks' ``forward`` while we run them. With
small images, a block's small operators take as long as its matrix products: additions, norms,
copies and rotations. These are fused here; matrix products and attention stay vLLM's own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.qwen2_5_vl import (
    Qwen2_5_VisionAttention,
    Qwen2_5_VisionBlock,
    Qwen2_5_VisionMLP,
)
from vllm.model_executor.models.qwen3_vl import Qwen3_VisionBlock

from vllm_graft.graph_runners.vision.fused.norm_kernel import (
    FEWEST_ROWS,
    MOST_COLUMNS,
    add_layer_norm,
    add_rms_norm,
)
from vllm_graft.graph_runners.vision.fused.pointwise_kernels import rotate_qk, silu_mul
from vllm_graft.graph_runners.vision.fused.side_mergers import SideMergers, replaced_forwards

Normed = tuple[torch.Tensor, torch.Tensor]
"""The normalised rows, and the sum that was normalised."""


class FusedBlocks:
    """The fused blocks of one tower, all of one class that :func:`find_blocks` knows: with norms
    fused with the additions before them, our kernel for the gate of a SwiGLU, and `mergers` that
    run beside the blocks, as far as there are any."""

    def __init__(self, blocks: Sequence[Any], norms: bool = True, gates: bool = True) -> None:
        self.blocks = list(blocks)
        self.norms, self.gates = norms, gates
        self.mergers: SideMergers | None = None
        self._ahead: Normed | None = None

    @property
    def parts(self) -> str:
        """The fused operators, in words."""
        names = {"rotation": True, "norms": self.norms, "gates": self.gates}
        names["mergers aside"] = self.mergers is not None
        return ", ".join(name for name, fused in names.items() if fused)

    @contextmanager
    def installed(self, aside: bool = True) -> Iterator[None]:
        """Run the blocks fused in the body, with the mergers beside them if `aside`."""
        pairs = zip(self.blocks, [*self.blocks[1:], None], strict=True)
        forwards = [(block, self._forward_of(block, following)) for block, following in pairs]
        mergers = self.mergers.installed() if self.mergers and aside else nullcontext()
        with replaced_forwards(forwards), mergers:
            self._ahead = None
            try:
                yield
            finally:
                self._ahead = None

    def _forward_of(self, block: Any, following: Any) -> Callable[..., torch.Tensor]:
        def forward(x: torch.Tensor, **attention: Any) -> torch.Tensor:
            ahead, self._ahead = self._ahead, None
            if ahead is not None and ahead[1] is x:
                normed = ahead[0]
            else:
                normed, _ = self._norm(block.norm1, x, None, True)
            attended = _attend(block.attn, normed, **attention)
            # RMSNorm adds by itself, in float32; the sum before another norm is rounded.
            rounded = not isinstance(block.norm2, RMSNorm)
            normed, total = self._norm(block.norm2, x, attended, rounded)
            product = _gated(block.mlp, normed) if self.gates else block.mlp(normed)
            if following is None or not self.norms:
                return total + product
            # The next block gets exactly this tensor, so that it finds its first norm computed.
            self._ahead = self._norm(following.norm1, total, product, True)
            return self._ahead[1]

        return forward

    def _norm(
        self, norm: Any, x: torch.Tensor, residual: torch.Tensor | None, rounded: bool
    ) -> Normed:
        """The norm of ``x + residual``, ``[rows, 1, width]`` each, and the sum. With `rounded`, the
        sum is rounded to its dtype before it is normalised."""
        if isinstance(norm, RMSNorm):
            if self.norms and x.shape[0] >= FEWEST_ROWS:
                return add_rms_norm(x, residual, norm.weight, norm.variance_epsilon, rounded)
            if residual is None:
                return norm(x), x
            if not rounded:
                normed, total = norm(x, residual=residual)
                return normed, total
        elif self.norms:
            return add_layer_norm(x, residual, norm.weight, norm.bias, norm.eps)
        total = x if residual is None else x + residual
        return norm(total), total


def find_blocks(model: Any) -> Sequence[Any] | None:
    """The blocks of a model's tower; None unless all have the operators that we fuse."""
    blocks = getattr(getattr(model, "visual", None), "blocks", None)
    if not blocks or not all(_known(block) for block in blocks):
        return None
    return list(blocks)


def _known(block: Any) -> bool:
    """Whether a block is one that we know, is not compiled, and has norms that our kernels take."""
    kinds = {Qwen3_VisionBlock: _is_layer_norm, Qwen2_5_VisionBlock: _is_rms_norm}
    is_norm = kinds.get(type(block))
    if is_norm is None or not getattr(block, "do_not_compile", True):
        return False
    if type(block.attn) is not Qwen2_5_VisionAttention or "forward" in vars(block):
        return False
    return is_norm(block.norm1) and is_norm(block.norm2)


def _is_layer_norm(norm: Any) -> bool:
    if type(norm) is not torch.nn.LayerNorm or norm.weight is None or norm.bias is None:
        return False
    width = norm.normalized_shape[-1]
    return len(norm.normalized_shape) == 1 and width % 4 == 0 and width <= MOST_COLUMNS


def _is_rms_norm(norm: Any) -> bool:
    if type(norm) is not RMSNorm or not norm.has_weight:
        return False
    return norm.variance_size_override is None and norm.hidden_size % 128 == 0


def _attend(
    attn: Any, x: torch.Tensor, cu_seqlens: torch.Tensor, rotary_pos_emb_cos: torch.Tensor,
    rotary_pos_emb_sin: torch.Tensor, max_seqlen: torch.Tensor,
    sequence_lengths: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """A block's attention over ``[rows, 1, width]``, with the arguments of the block's own. One
    kernel reads queries and keys from the projection's output and rotates them. `cu_seqlens` is
    int32 ``[segments + 1]``, and cosines and sines are ``[rows, size / 2]``, with the size of a
    head. `max_seqlen` lies on the host. Only FlashInfer needs `sequence_lengths`."""
    qkv, _ = attn.qkv(x)
    rows = qkv.shape[0]
    heads = attn.num_attention_heads_per_partition
    size = attn.hidden_size_per_attention_head
    cos, sin = rotary_pos_emb_cos.contiguous(), rotary_pos_emb_sin.contiguous()
    rotated = rotate_qk(qkv.view(rows, -1), cos, sin, heads)
    query, key = rotated[:, None].unbind(0)
    context = attn.attn(
        query=query,
        key=key,
        value=qkv.view(1, rows, 3, heads, size)[:, :, 2],
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        sequence_lengths=sequence_lengths,
    )
    out, _ = attn.proj(context.reshape(rows, 1, heads * size))
    return torch.as_tensor(out)


def _gated(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    if type(mlp) is not Qwen2_5_VisionMLP or type(mlp.act_fn) is not SiluAndMul:
        return torch.as_tensor(mlp(x))
    gate_up, _ = mlp.gate_up_proj(x)
    down, _ = mlp.down_proj(silu_mul(gate_up))
    return torch.as_tensor(down)
