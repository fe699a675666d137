"""How the host pool is divided into shards and slots, and a lower bound for the size of a page."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.options import target_of
from vllm_graft.hicache.config.cache_config import flag
from vllm_graft.hicache.pages.host_form import FORMS

PAGE = mmap.PAGESIZE
"""Bytes of a page of the operating system's memory, not of a page of KV."""

PIN_BYTES = 16 << 30
"""About the most bytes that one call pins. The driver's time per call grows with the size."""

_SMALLEST_BLOCK = 16
"""Tokens per block that are assumed before the attention backend has chosen the block size."""

_UNEVEN = (
    "attention_chunk_size",
    "block_configs",
    "interleaved_sliding_window",
    "num_kv_shared_layers",
    "sliding_window",
)
"""Keys of a model's configuration that say that its layers keep different amounts of K/V."""


@dataclass(frozen=True)
class PoolShape:
    """Sizes of the host pool. They are the same in every process of an engine. `num_slots`: slots
    per shard. A slot number means the same page in each of them. `slot_bytes`: bytes per slot, a
    multiple of :data:`PAGE`."""

    num_slots: int
    slot_bytes: int
    num_shards: int

    @classmethod
    def fit(cls, host_bytes: int, page_bytes: int, num_shards: int) -> PoolShape:
        """The shape with the most slots that fit into ``host_bytes``, those of all shards together.

        ``page_bytes`` are those of one rank's largest page. Raises `ConfigError` if not even one
        slot fits."""
        slot_bytes = -(-page_bytes // PAGE) * PAGE
        num_slots = host_bytes // (slot_bytes * num_shards)
        if num_slots < 1:
            raise ConfigError(
                f"{flag('host_bytes')} is {host_bytes}, but a page of KV takes {slot_bytes} bytes "
                f"on each of {num_shards} rank(s): give at least {slot_bytes * num_shards}."
            )
        return cls(num_slots, slot_bytes, num_shards)

    @property
    def shard_bytes(self) -> int:
        return self.num_slots * self.slot_bytes

    @property
    def pinned_slots(self) -> int:
        """Slots per pinned piece. CUDA refuses copies across the border of two pieces."""
        return max(1, PIN_BYTES // self.slot_bytes)

    @property
    def num_bytes(self) -> int:
        return self.shard_bytes * self.num_shards

    def part(self, shard: int, number: int = 0, count: int = 1) -> range:
        """The bytes of a shard, or of one of ``count`` parts of it, which are whole slots."""
        slots = (each * self.num_slots // count for each in (number, number + 1))
        return range(*(shard * self.shard_bytes + slot * self.slot_bytes for slot in slots))


@dataclass(frozen=True)
class Sharing:
    """What tells the engines of a pool that several share.

    Attributes:
        engine: id of this engine, 16 bytes that only its processes can derive.
        host_bytes: bytes of the pool as the user gave them, on which all engines agree.
    """

    engine: bytes
    host_bytes: int


def least_page_bytes(vllm_config: Any, host_dtype: str | None) -> int:
    """The least bytes of a page of a target or a draft on all ranks; 0 if its layers differ."""
    model = target_of(vllm_config)
    if model is None or not _is_even(model):
        return 0
    cache = vllm_config.cache_config
    block = cache.block_size
    if not cache.user_specified_block_size:
        block = min(block or _SMALLEST_BLOCK, _SMALLEST_BLOCK)
    numbers = 2 * model.get_total_num_kv_heads() * model.get_head_size()
    numbers *= model.get_total_num_hidden_layers() * block
    if host_dtype is not None:
        form = FORMS[host_dtype]
        return int(numbers // form.unit * form.unit_bytes)
    return int(numbers * _itemsize(str(cache.cache_dtype), model))


def _is_even(model: Any) -> bool:
    """Whether every layer keeps K and V of all its heads for every token."""
    if model.use_mla or model.is_hybrid or model.is_attention_free or model.is_encoder_decoder:
        return False
    text = model.hf_text_config
    kinds = set(getattr(text, "layer_types", None) or ())
    return kinds <= {"full_attention"} and not any(getattr(text, key, None) for key in _UNEVEN)


def _itemsize(cache_dtype: str, model: Any) -> int:
    if cache_dtype == "auto":
        return int(model.dtype.itemsize)
    if cache_dtype.startswith("fp8"):
        return 1
    return 2 if cache_dtype in ("bfloat16", "float16", "half") else 0
