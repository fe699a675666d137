"""Stand-ins for a model that is not loaded yet, on the device ``meta``, which has no memory."""

import copy
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self

import torch
from vllm.config import ModelConfig, VllmConfig

from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.heads.head import DraftHead
from vllm_graft.spec_decode.heads.hot_tokens import load_hot_tokens
from vllm_graft.spec_decode.kernels.attention.e4m3 import native
from vllm_graft.spec_decode.kernels.attention.own_rows import attend_own_rows
from vllm_graft.spec_decode.kernels.kernel_launch import cdiv
from vllm_graft.spec_decode.models.drafts import RefinerSizes, refiner_sizes
from vllm_graft.spec_decode.targets.dense.layer import TRITON, TreeAttentionMixin
from vllm_graft.spec_decode.targets.dense.window import DraftWindow
from vllm_graft.spec_decode.trees.batch import TreeBatch
from vllm_graft.spec_decode.verification.context import TreeContext

META = torch.device("meta")

_VOCABULARY_PADDING = 64
"""VLLM pads an output head's rows to a multiple of it; a row of logits is cut behind it."""

_TABLE_TOKENS = 128
"""VLLM pads the block table of a request to a multiple of as many tokens."""


def on_meta(thing: Any) -> Any:
    """A copy of an object, one level deep, whose tensors have no memory."""
    twin = copy.copy(thing)
    for name, value in vars(thing).items():
        if isinstance(value, torch.Tensor):
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
            setattr(twin, name, made)
    return twin


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device=META)


@dataclass(frozen=True)
class LayerShape:
    """The properties of one kind of layer that a kernel of attention is compiled for. Heads are
    those of this rank, `max_len` is in tokens, `fp8` says whether the cache is e4m3, and 0 stands
    for no `window` of positions and no `soft_cap` of logits."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    fp8: bool
    block_size: int
    max_len: int
    window: int = 0
    soft_cap: float = 0.0

    @classmethod
    def of(cls, model: ModelConfig, vllm_config: VllmConfig) -> list[Self]:
        """The kinds of layers that a model's configuration names. None for MLA, and beside
        recurrent layers, where vLLM chooses the size of blocks when the model is loaded."""
        if model.use_mla or vllm_config.model_config.is_hybrid:
            return []
        parallel, text = vllm_config.parallel_config, model.hf_text_config
        cache = vllm_config.cache_config
        window = getattr(text, "sliding_window", None) or 0
        if getattr(text, "use_sliding_window", True) is False:
            window = 0
        mixed = window and len(set(getattr(text, "layer_types", None) or ())) > 1
        return [
            cls(
                num_heads=model.get_num_attention_heads(parallel),
                num_kv_heads=model.get_num_kv_heads(parallel),
                head_size=model.get_head_size(),
                dtype=model.dtype,
                fp8=cache.cache_dtype.startswith("fp8"),
                block_size=cache.block_size or 16,
                max_len=vllm_config.model_config.max_model_len,
                window=size,
                soft_cap=float(getattr(text, "attn_logit_softcapping", None) or 0.0),
            )
            for size in ([0, window] if mixed else [window])
        ]

    def rows(self, count: int, heads: int) -> torch.Tensor:
        """Heads of so many rows, a part of a wider projection."""
        wide = empty(count, self.num_heads + 2 * self.num_kv_heads, self.head_size).to(self.dtype)
        return wide[:, :heads]

    def cache(self) -> torch.Tensor:
        """K/V ``[blocks, kv_heads, block_size, 2 * head_size]``, a slot's heads side by side."""
        dtype = torch.uint8 if self.fp8 else self.dtype
        sizes = (2, self.block_size, self.num_kv_heads, 2 * self.head_size)
        return empty(*sizes, dtype=dtype).transpose(1, 2)

    def block_table(self, num_reqs: int) -> torch.Tensor:
        step = _TABLE_TOKENS // math.gcd(_TABLE_TOKENS, self.block_size)
        return empty(num_reqs, cdiv(cdiv(self.max_len, self.block_size), step) * step)


class Attention(TreeAttentionMixin):
    """A layer's attention over trees without the platform's beneath it."""

    def __init__(self, shape: LayerShape, context: TreeContext, *, is_draft: bool) -> None:
        self.shape, self.graft, self.is_draft, self.ops = shape, context, is_draft, TRITON
        self.kv_cache_dtype = "fp8" if shape.fp8 else "auto"
        self.scale, self.logits_soft_cap = shape.head_size**-0.5, shape.soft_cap
        self.sliding_window, self.sinks = shape.window, None
        if is_draft and context.draft_window:
            self.window = DraftWindow(context.draft_window)
        scale = empty(1, dtype=torch.float32)
        self.layer: Any = SimpleNamespace(_q_scale=scale, _k_scale=scale, _v_scale=scale)

    def draft(self, metadata: Any) -> None:
        shape, rows = self.shape, metadata.num_reqs * metadata.topk
        query = shape.rows(rows, shape.num_heads)
        keys = shape.rows(rows, shape.num_kv_heads)
        out = torch.empty(query.shape, dtype=query.dtype, device=META)
        if self._quantized and native(self.graft.workspace.capability, out.dtype):
            query = query.to(torch.float8_e4m3fn)
        self._draft(self.layer, query, keys, keys, shape.cache(), metadata, out)

    def extend(self, num_reqs: int, rows: int) -> None:
        """Do what is ours of the layer's pass over rows that the target has accepted."""
        if self.window is not None:
            table, starts = self.shape.block_table(num_reqs), empty(num_reqs + 1)
            self.window.narrow(
                table, empty(num_reqs), starts, max_rows=rows, block_size=self.shape.block_size
            )

    def verify(self, num_reqs: int, rows: int, longest: int) -> None:
        """Do what the layer does over trees of so many rows each, and so many keys at most."""
        shape = self.shape
        query = shape.rows(num_reqs * rows, shape.num_heads)
        out = torch.empty(query.shape, dtype=query.dtype, device=META)
        if shape.fp8 and (self.two_pass or native(self.graft.workspace.capability, out.dtype)):
            # FlashAttention 3 takes no other query beside such a cache.
            query = query.to(torch.float8_e4m3fn)
        metadata = SimpleNamespace(
            query_start_loc=empty(num_reqs + 1),
            seq_lens=empty(num_reqs),
            block_table=shape.block_table(num_reqs),
            max_query_len=rows,
            max_seq_len=longest,
            num_actual_tokens=num_reqs * rows,
        )
        self._verify(self.layer, query, shape.cache(), metadata, out)


class SecondPass:
    """Stands for the two passes where FlashAttention's is not run: the pass over own rows."""

    def takes(self, metadata: Any, max_rows: int, *, alike: bool) -> bool:
        return True

    def attend(
        self, batch: TreeBatch, out: torch.Tensor, metadata: Any, *, multiprocessors: int
    ) -> None:
        tokens, heads = batch.query.shape[:2]
        prefix = torch.empty(batch.query.shape, dtype=out.dtype, device=META)
        attend_own_rows(batch, prefix, empty(heads, tokens, dtype=torch.float32), out)


def head(config: TreeConfig, model: ModelConfig, topk: int, target_vocab: int) -> DraftHead:
    """The output head of a draft that its configuration describes."""
    vocab = getattr(model.hf_config, "draft_vocab_size", None) or target_vocab
    hidden, dtype = model.get_hidden_size(), model.dtype
    padded = cdiv(vocab, _VOCABULARY_PADDING) * _VOCABULARY_PADDING

    def logits(*args: Any) -> torch.Tensor:
        return empty(args[-1].shape[0], padded, dtype=dtype)[:, :vocab]

    draft: Any = SimpleNamespace(
        compute_logits=logits,
        logits_processor=_Processor(logits, vocab),
        lm_head=SimpleNamespace(weight=empty(padded, hidden, dtype=dtype), tp_size=1),
        draft_id_to_target_id=None if vocab == target_vocab else empty(vocab, dtype=torch.int64),
    )
    hot = config.hot_tokens
    made = DraftHead(draft, topk, hot if isinstance(hot, int) else None, target_vocab)
    if isinstance(hot, str):
        size = len(load_hot_tokens(hot, target_vocab))
        made.target_ids = empty(size, dtype=torch.int64)
        made.hot_weight = empty(size, hidden, dtype=dtype)
    return made


def block_model(head: DraftHead, model: ModelConfig) -> Any:
    """A draft model of blocks whose logits are those of `head`, and whose biases look alike."""
    sizes = refiner_sizes(model.hf_config)
    return SimpleNamespace(
        compute_draft_logits=head.logits,
        markov_embed=lambda tokens: empty(len(tokens), 1),
        markov_bias=head.logits,
        apply_markov_bias_gathered=lambda embedded, logits, values, ids: logits,
        model=SimpleNamespace(xpress_head=_refiner(sizes, model.get_vocab_size(), model.dtype)),
    )


def _refiner(sizes: RefinerSizes, vocab: int, dtype: torch.dtype) -> Any:
    rank = sizes.rank

    def linear(inputs: int, outputs: int) -> torch.nn.Linear:
        return torch.nn.Linear(inputs, outputs, bias=False, device=META, dtype=dtype)

    return SimpleNamespace(
        rank=rank, topc=sizes.candidates or 0,
        hidden_cache=lambda blocks: empty(*blocks.shape[:2], 2 * rank, dtype=dtype),
        w1=torch.nn.Embedding(vocab, rank, device=META, dtype=dtype),
        in_proj=linear(3 * rank, rank), mix_L=empty(rank, sizes.rows, sizes.rows, dtype=dtype),
        mlp_gate=linear(rank, sizes.inner), mlp_up=linear(rank, sizes.inner),
        mlp_down=linear(sizes.inner, rank), w2=linear(rank, vocab),
    )  # fmt: skip


class _Processor:
    soft_cap, scale, head_dtype = None, 1.0, None

    def __init__(self, logits: Any, vocab: int) -> None:
        self._logits, self.org_vocab_size = logits, vocab

    def __call__(self, *args: Any) -> torch.Tensor:
        made: torch.Tensor = self._logits(*args)
        return made
