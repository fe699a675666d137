"""Grafts tree attention onto each attention layer of a loaded model. The platform's backend serves
prompts, chains and the draft's extend pass. Only rows of a drafted tree take another kernel."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import KVCacheConfig, is_quantized_kv_cache
from vllm.v1.worker.gpu.block_table import BlockTables

from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.kernels.attention import tree_attention as kernels
from vllm_graft.spec_decode.kernels.attention.e4m3 import native
from vllm_graft.spec_decode.kernels.compact import KVCacheTable, compact_kv
from vllm_graft.spec_decode.targets.dense import plain_attention as reference
from vllm_graft.spec_decode.targets.dense.dense_features import BACKENDS, KV_DTYPES
from vllm_graft.spec_decode.targets.dense.two_pass import TwoPass, why_not
from vllm_graft.spec_decode.targets.dense.window import (
    DraftWindow,
    chunk_of,
    keep_whole_batches,
    refuse_window,
    whole_batch,
    window_of,
    windowed_table,
)
from vllm_graft.spec_decode.trees.batch import DraftBatch, TreeBatch
from vllm_graft.spec_decode.verification.context import TreeContext, VerifyMode, VerifyStep

NO_LEVEL = -1
"""The level of rows whose layer keeps no K/V of a tree. They see the prefix alone, from its end."""


@dataclass
class DraftTreeMetadata:
    """Attention metadata of one level of the draft tree, for one layer of the draft.

    Attributes:
        level: whose rows run; 0 is the children of the root. `NO_LEVEL` for a layer that reads K/V
            of the target's and has none of its own.
        topk: frontier rows per request.
        num_reqs: requests, padding included; rows are ``num_reqs * topk``.
        prefix_lens: int32 ``[num_reqs]``, keys in the paged cache (0 for padding).
        block_table: int32 ``[num_reqs, max_blocks]``.
        ancestors: int32 ``[max_reqs, topk, steps]``, scratch slots that a frontier row sees.
        scratch: K/V of the tree ``[max_reqs, steps * topk, num_kv_heads, 2 * head_size]``, or
            latents ``[max_reqs, steps * topk, 1, rank + rope]``; without slots for `NO_LEVEL`.
        max_seq_len: upper bound of `prefix_lens`.
    """

    level: int
    topk: int
    num_reqs: int
    prefix_lens: torch.Tensor
    block_table: torch.Tensor
    ancestors: torch.Tensor
    scratch: torch.Tensor
    max_seq_len: int

    def of_batch(self) -> dict[str, Any]:
        """What batches of K/V and of latents take over: all but the scratch."""
        return {name: each for name, each in vars(self).items() if name != "scratch"}


class AttentionOps(NamedTuple):
    """The operations of tree attention, by Triton kernels or in plain torch."""

    tree_attention: Callable[..., None]
    write_scratch: Callable[..., None]
    windowed_table: Callable[..., tuple[torch.Tensor, torch.Tensor]] = windowed_table


TRITON = AttentionOps(kernels.tree_attention, kernels.write_scratch)
TORCH = AttentionOps(
    reference.tree_attention_reference,
    reference.write_scratch_reference,
    reference.windowed_table_reference,
)


def plain_query(query: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An e4m3 query times its scale, computed in `dtype`."""
    return query.to(dtype) * scale.to(dtype)


class TreeAttentionMixin:
    """Mixed in before a backend's `AttentionImpl`: computes tree rows, passes other rows on."""

    graft: TreeContext
    is_draft: bool
    ops: AttentionOps
    skips_trees: bool = False
    """Whether the platform's kernel may be told that rows of trees have no keys."""
    chunk: int = 0
    """Positions that share a chunk; 0 without chunked attention."""
    two_pass: TwoPass | None = None
    """The two passes, which compute some batches instead of `ops`; None where they can't run."""
    window: DraftWindow | None = None
    """What a draft's layer sees of a text; None for all of it."""

    def forward(
        self, layer: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        kv_cache: torch.Tensor, attn_metadata: Any, output: torch.Tensor,
        output_scale: torch.Tensor | None = None, output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Compute attention into `output` ``[num_tokens, num_heads, head_size]``."""
        if isinstance(attn_metadata, DraftTreeMetadata):
            self._draft(layer, query, key, value, kv_cache, attn_metadata, output)
            return output
        if self.window is not None and attn_metadata is not None:
            attn_metadata = self.window.of_extend(attn_metadata, kv_cache.shape[2])
        trees = not self.is_draft and attn_metadata is not None
        mode = self.graft.mode if trees else VerifyMode.NONE
        if mode is not VerifyMode.ALL:
            plain = attn_metadata
            if mode is VerifyMode.MIXED and self.skips_trees:
                plain = self.graft.plain_metadata(attn_metadata)
            found = super().forward(  # type: ignore[misc]
                layer, query, key, value, kv_cache, plain, output, output_scale, output_block_scale
            )
            if mode is VerifyMode.NONE:
                return found
        self._verify(layer, query, kv_cache, attn_metadata, output)
        return output

    def _verify(
        self,
        layer: Attention,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
    ) -> None:
        context = self.graft
        # The queries of a captured graph may be narrower than the widest tree, root and nodes.
        metadata = whole_batch(metadata)
        max_rows = min(context.shape.num_nodes + 1, metadata.max_query_len)
        two_pass = self._two_passes(query, metadata, max_rows)
        if two_pass is not None:
            query = query[: metadata.num_actual_tokens]
        else:
            query = self._kernel_query(layer, query, output)
        num_reqs = metadata.query_start_loc.shape[0] - 1
        batch = TreeBatch(
            query=query, kv_cache=self._cache(kv_cache), query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens[:num_reqs], prefix_lens=context.rows.prefix_lens[:num_reqs],
            block_table=metadata.block_table, row_masks=context.rows.row_masks,
            row_depths=context.rows.row_depths, num_rows=context.rows.num_rows[:num_reqs],
            max_rows=max_rows, max_seq_len=metadata.max_seq_len,
            q_scale=layer._q_scale if self._quantized else None,
            mixed=context.mode is VerifyMode.MIXED, chunked=self.chunk > 0, **self._scales(layer),
        )  # fmt: skip
        if two_pass is not None:
            multiprocessors = context.workspace.multiprocessors
            two_pass.attend(batch, output, metadata, multiprocessors=multiprocessors)
        else:
            self.ops.tree_attention(batch, output, workspace=context.workspace)

    def _two_passes(self, query: torch.Tensor, metadata: Any, max_rows: int) -> TwoPass | None:
        """The two passes, if they take this batch."""
        two_pass = self.two_pass
        if two_pass is None or self.graft.mode is not VerifyMode.ALL:
            return None
        alike = self._quantized == (query.dtype == torch.float8_e4m3fn)
        return two_pass if two_pass.takes(metadata, max_rows, alike=alike) else None

    def _draft(
        self, layer: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        kv_cache: torch.Tensor, metadata: DraftTreeMetadata, output: torch.Tensor,
    ) -> None:  # fmt: skip
        if metadata.level != NO_LEVEL:
            self.ops.write_scratch(
                key, value, metadata.scratch, metadata.level, metadata.num_reqs, metadata.topk
            )
        if self.window is not None:
            metadata = self.window.of_level(metadata, kv_cache.shape[2])
        batch = DraftBatch(
            query=self._kernel_query(layer, query, output),
            q_scale=layer._q_scale if self._quantized else None,
            kv_cache=self._cache(kv_cache),
            scratch_kv=metadata.scratch,
            **metadata.of_batch(),
            **self._scales(layer),
        )
        self.ops.tree_attention(batch, output, workspace=self.graft.workspace)

    @property
    def _quantized(self) -> bool:
        return bool(is_quantized_kv_cache(self.kv_cache_dtype))

    def _kernel_query(
        self, layer: Attention, query: torch.Tensor, output: torch.Tensor
    ) -> torch.Tensor:
        """The query as the kernels of trees take it: vLLM makes e4m3 ones beside an e4m3 cache."""
        if query.dtype == output.dtype:
            return query
        if native(self.graft.workspace.capability, output.dtype):
            return query
        return plain_query(query, layer._q_scale, output.dtype)

    def _cache(self, kv_cache: torch.Tensor) -> torch.Tensor:
        if self._quantized and kv_cache.dtype == torch.uint8:
            return kv_cache.view(torch.float8_e4m3fn)
        return kv_cache

    def _scales(self, layer: Attention) -> dict[str, Any]:
        quantized = self._quantized
        return {
            "scale": self.scale,
            "k_scale": layer._k_scale if quantized else None,
            "v_scale": layer._v_scale if quantized else None,
            "soft_cap": float(getattr(self, "logits_soft_cap", 0.0) or 0.0),
            "window": self.chunk or window_of(self),
            "sinks": getattr(self, "sinks", None),
        }

    # Declared for type checkers; set by the backend's own constructor.
    kv_cache_dtype: str
    scale: float


@functools.cache
def _tree_impl(base: type) -> type:
    return type(f"Tree{base.__name__}", (TreeAttentionMixin, base), {})


def graft_attention(name: str, layer: Attention, context: TreeContext, *, is_draft: bool) -> None:
    """Make the attention layer `name` compute tree rows besides what it does, or refuse it."""
    backend = layer.get_attn_backend().get_name()
    if backend not in BACKENDS:
        raise ConfigError(
            f"--additional-config.graft.tree needs one of the attention backends "
            f"{', '.join(BACKENDS)}, but layer {name} uses {backend}: "
            f"pass --attention-backend FLASH_ATTN or --attention-backend TRITON_ATTN"
        )
    refuse_format(name, layer.impl.kv_cache_dtype)
    chunk = chunk_of(layer)
    if chunk and is_draft:
        raise ConfigError(
            f"--additional-config.graft.tree needs a draft without chunked attention, but layer "
            f"{name} has chunks of {chunk}: remove the graft.tree keys to draft chains"
        )
    window = context.draft_window if is_draft else 0
    if window and (own := window_of(layer.impl)):
        refuse_window(name, f"has a window of {own} positions of its own")
    ops = TRITON
    if backend == "CPU_ATTN":
        reference.replace(layer)
        ops = TORCH
    elif chunk:
        keep_whole_batches(layer)
    # A new instance with the same attributes, because CPython refuses to assign a class with a
    # mixin to `__class__`.
    base: type = type(layer.impl)
    cls = _tree_impl(base)
    impl: Any = object.__new__(cls)
    impl.__dict__.update(vars(layer.impl))
    impl.graft, impl.is_draft, impl.ops, impl.chunk = context, is_draft, ops, chunk
    impl.skips_trees = why_not(layer) is None
    impl.window = DraftWindow(window, ops.windowed_table) if window else None
    layer.impl = impl


def refuse_format(name: str, kv_cache_dtype: str) -> None:
    """Refuse a cache of a format that the kernels of trees do not read."""
    if kv_cache_dtype not in KV_DTYPES:
        raise ConfigError(
            f"--additional-config.graft.tree cannot read --kv-cache-dtype {kv_cache_dtype} "
            f"of layer {name}: use one of {', '.join(KV_DTYPES)}"
        )


@dataclass
class DenseState:
    """K/V in pages: node i has the i-th new slot, and the accepted path moves to the front.
    `slot_mappings` is int64 ``[groups, max_tokens]``, the slot of each row of the batch."""

    table: KVCacheTable
    slot_mappings: torch.Tensor
    reads_rows: bool = False

    @classmethod
    def of(
        cls,
        caches: Mapping[str, torch.Tensor],
        kv_cache_config: KVCacheConfig,
        block_tables: BlockTables,
    ) -> Self:
        """The state of layers by name, each with its cache by heads."""
        groups = enumerate(kv_cache_config.kv_cache_groups)
        own = {name: n for n, group in groups for name in group.layer_names if name in caches}
        table = KVCacheTable.build([caches[name] for name in own], list(own.values()))
        return cls(table, block_tables.slot_mappings)

    def fork(self, step: VerifyStep) -> None:
        """Do nothing: every node has a slot of its own."""

    def commit(self, path: torch.Tensor, step: VerifyStep) -> None:
        """Move the accepted path's K/V to where a chain would have written it."""
        assert step.num_sampled is not None
        compact_kv(
            self.table, path, step.num_sampled, step.batch.query_start_loc, step.num_drafts,
            self.slot_mappings, num_reqs=step.batch.num_reqs,
        )  # fmt: skip


class DenseFamily:
    """Every token attends to the tokens before it, or to the last ones of them in a window."""

    def claims(self, layer: Any) -> bool:
        return isinstance(layer, Attention)

    def attach(self, name: str, layer: Any, context: TreeContext, *, is_draft: bool) -> None:
        window = window_of(layer.impl)
        if is_draft and 0 < window < context.shape.steps:
            raise ConfigError(
                f"--additional-config.graft.tree.steps is {context.shape.steps}, but layer {name} "
                f"of the draft has a window of {window} positions: set steps to {window} or less"
            )
        graft_attention(name, layer, context, is_draft=is_draft)

    def state(
        self, layers: Mapping[str, Any], kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> DenseState:
        # A layer that reads another's K/V would have them moved twice.
        own = {n: each for n, each in layers.items() if not each.kv_sharing_target_layer_name}
        caches = {name: layer.kv_cache for name, layer in own.items()}
        return DenseState.of(caches, kv_cache_config, block_tables)
