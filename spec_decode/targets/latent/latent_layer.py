"""Grafts tree attention onto layers with MLA, of a target or of a draft, in its absorbed form.

vLLM computes a batch's leading requests in the absorbed form, where all heads read latents, and the
others with K and V of each head. Which form a tree's rows would get depends on the backend and on
other requests. So we stand before the choice, in ``MLAAttention.forward_impl``, and compute rows of
trees in the absorbed form by our kernel. Latents of a draft's level go to a scratch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import MLAAttention
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from vllm_graft.base.errors import ConfigError, SeamError
from vllm_graft.seams.permission import require_seams
from vllm_graft.spec_decode.kernels.attention.tree_attention import write_scratch
from vllm_graft.spec_decode.targets.dense.layer import DenseState, DraftTreeMetadata, refuse_format
from vllm_graft.spec_decode.targets.dense.plain_attention import write_scratch_reference
from vllm_graft.spec_decode.targets.dense.window import refuse_window
from vllm_graft.spec_decode.targets.latent import latent_attention as kernels
from vllm_graft.spec_decode.targets.latent import plain_latent as reference
from vllm_graft.spec_decode.targets.latent.latent_features import LATENT_BACKENDS
from vllm_graft.spec_decode.trees.batch import LatentBatch, LatentDraftBatch
from vllm_graft.spec_decode.verification.context import VerifyMode

if TYPE_CHECKING:
    from vllm.models.kimi_k3.nvidia.mla import MultiHeadLatentAttention
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu.block_table import BlockTables

    from vllm_graft.spec_decode.targets.dense.two_pass import TwoPass
    from vllm_graft.spec_decode.verification.context import TreeContext

_KIMI = "vllm.models.kimi_k3.nvidia.mla"


def is_latent(layer: Any) -> bool:
    """Whether a layer has MLA, Kimi Linear's or that of other models."""
    # The module brings many kernels: it is there if such a layer is.
    module = sys.modules.get(_KIMI)
    kimi = module is not None and isinstance(layer, module.MultiHeadLatentAttention)
    return kimi or isinstance(layer, MLAAttention)


class LatentOps(NamedTuple):
    """The operations of tree attention over latents, by Triton kernels or in plain torch."""

    attention: Callable[..., None]
    copy_tree_rows: Callable[..., None]
    write_scratch: Callable[..., None]


TRITON = LatentOps(kernels.latent_attention, kernels.copy_tree_rows, write_scratch)
TORCH = LatentOps(
    reference.latent_attention_reference,
    reference.copy_tree_rows_reference,
    write_scratch_reference,
)


class TreePart(NamedTuple):
    """The part of a batch in which trees are: up to the last request with one."""

    num_reqs: int
    num_tokens: int
    block_table: torch.Tensor


@dataclass
class LatentTrees:
    """Computes rows of trees over latents of a layer, an ``MLAAttention`` or one with its parts."""

    layer: Any
    context: TreeContext
    ops: LatentOps
    two_pass: TwoPass | None = field(default=None, init=False)

    def part(self, metadata: Any) -> TreePart:
        return self.context.once(metadata, self._tree_part)

    def verify(
        self,
        query: torch.Tensor,
        rope: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
    ) -> None:
        """Compute the rows of a batch's trees into `output`; other rows stay as they are. Absorbed
        queries of the rows of `part` are ``[num_tokens, num_heads, rank]``, their rotated parts
        ``[num_tokens, num_heads, rope]``, and outputs ``[>= num_tokens, num_heads * v_dim]``. The
        cache ``[num_blocks, block_size, rank + rope]`` holds the rows' latents."""
        layer, context, part = self.layer, self.context, self.part(metadata)
        batch = LatentBatch(
            query=query,
            query_rope=rope,
            latents=kv_cache,
            query_start_loc=metadata.query_start_loc[: part.num_reqs + 1],
            prefix_lens=context.rows.prefix_lens[: part.num_reqs],
            block_table=part.block_table,
            row_masks=context.rows.row_masks,
            num_rows=context.rows.num_rows,
            # The queries of a captured graph may be narrower than the widest tree.
            max_rows=min(context.shape.num_nodes + 1, metadata.max_query_len),
            max_seq_len=metadata.max_seq_len,
            scale=layer.scale,
            k_scale=self.k_scale,
            mixed=context.mode is VerifyMode.MIXED,
        )
        attended = self._attended(batch, metadata)
        rows = output[: part.num_tokens]
        if not batch.mixed:
            layer._v_up_proj(attended, out=rows)
            return
        values = torch.empty_like(rows)
        layer._v_up_proj(attended, out=values)
        self.ops.copy_tree_rows(values, rows, batch)

    def _attended(self, batch: LatentBatch, metadata: Any) -> torch.Tensor:
        """Weighted latents of tree rows, by the kernel that is chosen for such a batch. Rows of no
        tree, such as a graph's padding, must not be NaN, which a MoE layer that shares its buffers
        among rows might spread. So they are zeros, except in a mixed batch, which uses none."""
        space, two_pass = self.context.workspace, self.two_pass
        if (
            two_pass is not None
            and not batch.mixed
            and two_pass.takes(metadata, batch.max_rows, alike=True)
        ):
            # The second pass writes the zeros.
            return two_pass.attend(batch, None, metadata, multiprocessors=space.multiprocessors)
        out = torch.empty_like(batch.query) if batch.mixed else torch.zeros_like(batch.query)
        self.ops.attention(batch, out, workspace=space)
        return out

    def absorbed(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The parts of queries that meet latents and rotated parts."""
        layer = self.layer
        nope, rope = q.split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], dim=-1)
        query = q.new_empty(*nope.shape[:2], layer.kv_lora_rank)
        torch.bmm(nope.transpose(0, 1), layer.W_UK_T, out=query.transpose(0, 1))
        return query, rope

    @property
    def k_scale(self) -> torch.Tensor | None:
        layer = self.layer
        return layer._k_scale if is_quantized_kv_cache(layer.kv_cache_dtype) else None

    def _tree_part(self, metadata: Any) -> TreePart:
        """Where the trees of a batch are, by host values alone."""
        num_reqs, num_tokens = metadata.num_reqs, metadata.num_actual_tokens
        step = self.context.step
        if self.context.mode is VerifyMode.MIXED and step is not None:
            # vLLM puts requests with drafts first.
            drafts = step.batch.num_draft_tokens_per_req
            assert drafts is not None
            num_reqs = int(drafts.nonzero()[0][-1]) + 1
            num_tokens = int(step.batch.num_scheduled_tokens[:num_reqs].sum())
        # The metadata has the tables of both forms apart. A captured batch is in one form, so that
        # its table is the engine's own, which replays find filled.
        forms = [form for form in (metadata.decode, metadata.prefill) if form is not None]
        tables = [form.block_table for form in forms]
        table = tables[0] if len(tables[0]) >= num_reqs else torch.cat(tables)
        return TreePart(num_reqs, num_tokens, table[:num_reqs])


@dataclass
class TreeLatents(LatentTrees):
    """In place of a layer's ``forward_impl`` (`stock`): computes tree rows, passes others on."""

    stock: Callable[..., torch.Tensor]
    is_draft: bool = False

    def __call__(
        self, q: torch.Tensor, k_c_normed: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: Any, output: torch.Tensor, *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Compute attention into `output` ``[num_tokens, num_heads * v_head_dim]``. Latents of the
        rows `k_c_normed` ``[num_tokens, rank]`` and their rotated parts `k_pe` ``[num_tokens, 1,
        rope]`` are in the cache already, but for those of a draft's level, whose metadata is a
        `DraftTreeMetadata`. It is None in a run without attention."""
        if isinstance(attn_metadata, DraftTreeMetadata):
            self._draft(q, k_c_normed, k_pe, kv_cache, attn_metadata, output)
            return output
        mode = VerifyMode.NONE if self.is_draft else self.context.mode
        plain = attn_metadata is None or mode is VerifyMode.NONE
        if plain or mode is VerifyMode.MIXED:
            self.stock(q, k_c_normed, k_pe, kv_cache, attn_metadata, output, *args, **kwargs)
        if not plain:
            count = self.part(attn_metadata).num_tokens
            self.verify(*self.absorbed(q[:count]), kv_cache, attn_metadata, output)
        return output

    def _draft(
        self, q: torch.Tensor, latent: torch.Tensor, rotated: torch.Tensor, kv_cache: torch.Tensor,
        metadata: DraftTreeMetadata, output: torch.Tensor,
    ) -> None:  # fmt: skip
        layer, rows = self.layer, len(q)
        self.ops.write_scratch(
            latent.view(rows, 1, layer.kv_lora_rank),
            rotated.view(rows, 1, layer.qk_rope_head_dim),
            metadata.scratch,
            metadata.level,
            metadata.num_reqs,
            metadata.topk,
        )
        query, rope = self.absorbed(q)
        batch = LatentDraftBatch(
            query=query,
            query_rope=rope,
            latents=kv_cache,
            scratch=metadata.scratch,
            **metadata.of_batch(),
            scale=layer.scale,
            k_scale=self.k_scale,
        )
        attended = torch.empty_like(query)
        self.ops.attention(batch, attended, workspace=self.context.workspace)
        layer._v_up_proj(attended, out=output)


def ops_for(name: str, layer: Any, *, is_draft: bool = False) -> LatentOps:
    """The operations that read the latents of the layer `name`, or refuse it."""
    backend = layer.get_attn_backend().get_name()
    if backend not in LATENT_BACKENDS:
        raise ConfigError(
            f"--additional-config.graft.tree needs one of the attention backends "
            f"{', '.join(LATENT_BACKENDS)} for MLA, but layer {name} uses {backend}: pass "
            f"--{'speculative-config.attention_backend' if is_draft else 'attention-backend'} "
            f"{'CPU_MLA' if backend == 'AMX_MLA' else 'TRITON_MLA'}"
        )
    refuse_format(name, layer.kv_cache_dtype)
    return TORCH if backend == "CPU_MLA" else TRITON


def graft_latents(
    name: str, layer: MLAAttention, context: TreeContext, *, is_draft: bool = False
) -> None:
    """Make the layer `name` compute tree rows besides what it does already, or refuse it."""
    ops = ops_for(name, layer, is_draft=is_draft)
    if layer._vllm_config.compilation_config.pass_config.fuse_attn_quant:
        raise ConfigError(
            f"--compilation-config.pass_config.fuse_attn_quant quantizes what layer {name} "
            f"returns, and --additional-config.graft.tree does not: set it to false"
        )
    trees = TreeLatents(layer, context, ops, layer.forward_impl, is_draft)
    layer.forward_impl = layer.tree_latents = trees


@dataclass
class TreeKimiLatents(LatentTrees):
    """In place of ``_attention`` (`stock`) of a layer with MLA of Kimi Linear, a class of its own.
    Such a layer writes latents to the cache in the pass that makes their queries. So we stand
    before both. It computes batches with prompts, and rows of trees are computed again."""

    stock: Callable[..., None]

    def __call__(
        self,
        positions: torch.Tensor,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        attn_out: torch.Tensor,
    ) -> None:
        """Compute attention into `attn_out` ``[num_tokens, num_heads * v_head_dim]``. `q` is
        ``[num_tokens, num_heads, qk_head_dim]``, latents of the rows are ``[num_tokens, rank]``,
        keys that heads share ``[num_tokens, 1, rope]``. Without rotations `positions` go unused."""
        known, mode = get_forward_context().attn_metadata, self.context.mode
        plain = not isinstance(known, dict) or mode is VerifyMode.NONE
        if plain or mode is VerifyMode.MIXED:
            self.stock(positions, q, kv_c_normed, k_pe, attn_out)
        if plain:
            return
        layer = self.layer
        metadata = known[layer.layer_name]
        count = self.part(metadata).num_tokens
        query, rope = self.absorbed(q[:count])
        if mode is not VerifyMode.MIXED:
            self._write(query, rope, kv_c_normed[:count], k_pe[:count])
        self.verify(query, rope, layer._attn_read_kv_cache(), metadata, attn_out)

    def _write(
        self, query: torch.Tensor, rope: torch.Tensor, latents: torch.Tensor, keys: torch.Tensor
    ) -> None:
        """Write the latents of the rows to the cache, as the layer writes those of decodes."""
        layer = self.layer
        slots = get_forward_context().slot_mapping
        assert isinstance(slots, dict)
        own = slots[layer.layer_name][: len(query)]
        layer._decode_concat_cache(query, rope, latents, keys, None, None, own)


def graft_kimi_latents(
    name: str, layer: MultiHeadLatentAttention, context: TreeContext, *, is_draft: bool
) -> None:
    """Make the layer `name` compute tree rows besides what it does already, or refuse it."""
    if is_draft or layer.rotary_emb is not None:
        raise ConfigError(
            f"--additional-config.graft.tree does not support layers like {name}, a "
            f"{type(layer).__name__} {'of a draft' if is_draft else 'with rotations'}: remove the "
            f"graft.tree keys to draft chains"
        )
    trees = TreeKimiLatents(layer, context, ops_for(name, layer), layer._attention)
    layer.tree_latents = trees
    # Its own is no part of a PIECEWISE graph, which it interrupts; nor is ours.
    layer._attention = eager_break_during_capture(trees)


class LatentFamily:
    """Layers that cache one latent per token, which moves as K/V of plain attention do."""

    _checked = False

    def claims(self, layer: Any) -> bool:
        return is_latent(layer)

    def attach(self, name: str, layer: Any, context: TreeContext, *, is_draft: bool) -> None:
        if is_draft and context.draft_window:
            refuse_window(name, "has MLA")
        if isinstance(layer, MLAAttention):
            graft_latents(name, layer, context, is_draft=is_draft)
            return
        if not self._checked:
            require_seams("kimi")
            self._checked = True
        graft_kimi_latents(name, layer, context, is_draft=is_draft)

    def state(
        self, layers: Mapping[str, Any], kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> DenseState:
        caches = {name: _latents(name, layer.kv_cache) for name, layer in layers.items()}
        return DenseState.of(caches, kv_cache_config, block_tables)


def _latents(name: str, cache: torch.Tensor) -> torch.Tensor:
    """A layer's latents as K/V of one head, ``[blocks, 1, block_size, rank + rope]``."""
    if cache.dim() != 3:
        raise SeamError(
            f"vLLM bound the latents of {name} as {list(cache.shape)}, and vllm-graft reads them "
            "as [blocks, block_size, rank + rope]: remove the keys of "
            "--additional-config.graft.tree, and report this with vLLM's version"
        )
    return cache.unsqueeze(1)
