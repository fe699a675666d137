"""Sliding windows, chunks and a draft's own window: where they begin, and what a layer is told."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from vllm.v1.attention.backend import subclass_attention_backend

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.options import flag
from vllm_graft.spec_decode.kernels.kernel_launch import Kernel

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata

    from vllm_graft.spec_decode.targets.dense.layer import DraftTreeMetadata

SINK_BLOCKS = 1
"""Blocks at the beginning of a text that are always seen (StreamingLLM, arXiv:2309.17453). Cached
keys are rotated by their own positions, so that a table may leave out the blocks behind these."""

_PIECE = 128


def table_width(window: int, max_rows: int, block_size: int) -> int:
    """Entries that a request's table of a window needs at most; see `windowed_table`."""
    # The first token and the last one may share their blocks with others.
    return SINK_BLOCKS + (window + max_rows - 1) // block_size + 2


@Kernel
@triton.jit(do_not_specialize=["window", "table_stride", "table_blocks", "out_stride", "out_width"])
def _window_kernel(
    table, kv_lens, query_start_loc, out_table, out_lens, window, table_stride, table_blocks,
    out_stride, out_width,
    BLOCK_SIZE: tl.constexpr, SINK: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    req = tl.program_id(0).to(tl.int64)
    kv_len = tl.load(kv_lens + req)
    rows = 0
    if query_start_loc is not None:
        rows = tl.load(query_start_loc + req + 1) - tl.load(query_start_loc + req)
    first = tl.maximum(kv_len - rows - window, 0) // BLOCK_SIZE
    dropped = tl.maximum(first - SINK, 0)
    # Only requests of dummy batches have more keys than there is room for.
    kept = tl.minimum(kv_len - dropped * BLOCK_SIZE, out_width * BLOCK_SIZE)
    used = tl.cdiv(kept, BLOCK_SIZE)
    for start in range(0, out_width, PIECE):
        at = start + tl.arange(0, PIECE)
        source = at + tl.where(at < SINK, 0, dropped)
        exists = (at < used) & (source < table_blocks)
        block = tl.load(table + req * table_stride + source, mask=exists, other=0)
        tl.store(out_table + req * out_stride + at, block, mask=at < out_width)
    tl.store(out_lens + req, kept)


def windowed_table(
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    *,
    window: int,
    max_rows: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks that a request's rows see: the first, and those of a window before its first row.

    No device value is read on the host, so the call can be captured. Returns int32 ``[num_reqs,
    width]``, block 0 where no key is, and the keys among these blocks.

    Args:
        block_table: int32 ``[num_reqs, max_blocks]``.
        kv_lens: int32 ``[>= num_reqs]``, keys of each request, including those of its rows.
        query_start_loc: int32 ``[>= num_reqs + 1]``; None if no row has its keys in the cache.
        window: tokens that are seen before a request's first row, at least; more of them as far as
            their block begins earlier.
        max_rows: upper bound of a request's rows whose keys are in the cache.
    """
    num_reqs, table_blocks = block_table.shape
    width = min(table_width(window, max_rows, block_size), table_blocks)
    table = block_table.new_empty(num_reqs, width)
    lens = kv_lens.new_empty(num_reqs)
    if num_reqs:
        _window_kernel[(num_reqs,)](
            block_table, kv_lens, query_start_loc, table, lens, window, block_table.stride(0),
            table_blocks, table.stride(0), width,
            BLOCK_SIZE=block_size, SINK=SINK_BLOCKS, PIECE=_PIECE, num_warps=1,
        )  # fmt: skip
    return table, lens


_KEPT = "graft_whole_batch"


def window_of(impl: Any) -> int:
    """The positions that a row of an ``AttentionImpl`` sees, its own among them; 0 for all."""
    window = getattr(impl, "sliding_window", None)
    if isinstance(window, (tuple, list)):
        # GPU backends keep a pair, keys before and behind a row.
        window = window[0] + 1
    return max(0, window or 0)


def chunk_of(layer: Any) -> int:
    """The positions that share a chunk in a layer of vLLM's ``ChunkedLocalAttention``; else 0."""
    return getattr(layer, "attention_chunk_size", None) or 0


def first_key(position: int, window: int, *, chunked: bool = False) -> int:
    """The position of the first key that a row at `position` sees; a `window` of 0 is none."""
    if not window:
        return 0
    return position // window * window if chunked else max(0, position - window + 1)


@dataclass
class WholeBatch:
    """What tree attention reads of a batch, under the names that every paged backend has.
    `query_start_loc`: i32 ``[num_reqs + 1]``. `seq_lens`: i32 ``[num_reqs]``, keys per request,
    including those of its new tokens. `block_table`: i32 ``[num_reqs, max_blocks]``."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int
    max_seq_len: int

    @classmethod
    def of(cls, common: CommonAttentionMetadata) -> WholeBatch:
        """The batch that vLLM describes to all backends; its tensors are the persistent buffers."""
        return cls(
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            common.max_query_len,
            common.max_seq_len,
        )


def whole_batch(metadata: Any) -> Any:
    """The batch that a layer's metadata was built for; the metadata itself where it is whole."""
    return getattr(metadata, _KEPT, metadata)


def keep_whole_batches(layer: Attention) -> None:
    """Let the metadata of a loaded layer with chunked attention hold the whole batch as well. vLLM
    makes a sequence of each chunk that a request's rows lie in, and builds the platform's metadata
    for these (``make_local_attention_virtual_batches``). It asks for the layer's backend when all
    layers are loaded."""
    layer.attn_backend = _keeping(layer.attn_backend)


@functools.cache
def _keeping(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """A backend's subclass whose builder keeps the batch; one class per backend, as vLLM groups."""
    stock: Any = backend.get_builder_cls()

    class WholeBatchBuilder(stock):
        def build(
            self,
            common_prefix_len: int,
            common_attn_metadata: CommonAttentionMetadata,
            fast_build: bool = False,
        ) -> Any:
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            setattr(metadata, _KEPT, WholeBatch.of(common_attn_metadata))
            return metadata

    whole: type[AttentionBackend] = subclass_attention_backend("Whole", backend, WholeBatchBuilder)
    return whole


Narrow = Callable[..., tuple["torch.Tensor", "torch.Tensor"]]
"""A function like `windowed_table`."""


class DraftWindow:
    """Narrows the metadata of one layer's passes to the first block and those of the last `tokens`.
    The kernels are not told: to them a request is a shorter text. All rows of a pass share one
    window, which ends at the first of them. So rows of a prompt's part see it besides."""

    def __init__(self, tokens: int, narrow: Narrow = windowed_table) -> None:
        self.narrow = functools.partial(narrow, window=tokens)
        self._levels: tuple[torch.Tensor, torch.Tensor] | None = None
        """The tables of the tree that is growing, which all of its levels share."""

    def of_extend(self, metadata: Any, block_size: int) -> Any:
        """The metadata of a pass over a prompt, or over the rows that the target has accepted."""
        table, lens = self.narrow(
            metadata.block_table,
            metadata.seq_lens,
            metadata.query_start_loc,
            max_rows=metadata.max_query_len,
            block_size=block_size,
        )
        changed = {
            "block_table": table,
            "seq_lens": lens,
            "max_seq_len": min(metadata.max_seq_len, table.shape[1] * block_size),
        }
        if getattr(metadata, "scheduler_metadata", None) is not None:
            # FlashAttention's schedule was made for whole texts. Without one its launch makes one.
            changed["scheduler_metadata"] = None
        return dataclasses.replace(metadata, **changed)

    def of_level(self, metadata: DraftTreeMetadata, block_size: int) -> DraftTreeMetadata:
        """The metadata of a level; the levels of a tree come in their order, the first is 0."""
        if metadata.level == 0 or self._levels is None:
            # In a graph the first level makes the tables anew, and the others read them there.
            self._levels = self.narrow(
                metadata.block_table, metadata.prefix_lens, None, max_rows=0, block_size=block_size
            )
        table, lens = self._levels
        return dataclasses.replace(
            metadata,
            block_table=table,
            prefix_lens=lens,
            max_seq_len=min(metadata.max_seq_len, table.shape[1] * block_size),
        )


def refuse_window(name: str, kind: str) -> None:
    """Refuse a window over a layer of the draft that can't have one."""
    raise ConfigError(
        f"{flag('tree', 'draft_window')} needs a draft of plain attention over whole texts, but "
        f"layer {name} {kind}: drop the key"
    )
