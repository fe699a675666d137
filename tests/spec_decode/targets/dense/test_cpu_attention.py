"""Plain attention for CPUs, compared with a softmax that is written out key by key."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.targets.dense import cpu_attention as torch_attention
from vllm_graft.spec_decode.targets.dense.cpu_attention import TorchAttentionImpl
from vllm_graft.spec_decode.targets.dense.window import WholeBatch

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 8, 16


def problem() -> tuple[TorchAttentionImpl, torch.Tensor, torch.Tensor, WholeBatch]:
    """Make requests of 1 new key after 20, 5 after 0, none, 3 after 30."""
    generator = torch.Generator().manual_seed(0)
    lengths, new = [21, 5, 9, 33], [1, 5, 0, 3]
    starts = torch.tensor([0, *new]).cumsum(0).int()
    tables = torch.randperm(12, generator=generator).view(4, 3).int()
    cache = torch.randn(12, KV_HEADS, BLOCK, 2 * SIZE, generator=generator)
    query = torch.randn(sum(new) + 2, HEADS, SIZE, generator=generator)
    metadata = WholeBatch(starts, torch.tensor(lengths), tables, max(new), max(lengths))
    return TorchAttentionImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS), query, cache, metadata


def run(
    impl: TorchAttentionImpl, query: torch.Tensor, cache: torch.Tensor, metadata: WholeBatch
) -> torch.Tensor:
    output = torch.full_like(query, 7.0)
    return impl.forward(None, query, query, query, cache, metadata, output)


def plain(
    query: torch.Tensor,
    cache: torch.Tensor,
    metadata: WholeBatch,
    lag: int = 0,
    window: int = 1000,
    sinks: torch.Tensor | None = None,
    chunk: int = 1000,
) -> torch.Tensor:
    output = torch.full_like(query, 7.0)
    for r, (first, last) in enumerate(itertools.pairwise(metadata.query_start_loc.tolist())):
        length = int(metadata.seq_lens[r])
        for row, head in itertools.product(range(first, last), range(HEADS)):
            seen = length - (last - 1 - row) - lag
            weights, total = [], torch.zeros(SIZE)
            position = seen - 1
            for key in range(max(0, seen - window, position - position % chunk), seen):
                slot = cache[int(metadata.block_table[r, key // BLOCK]), head // 2, key % BLOCK]
                weights.append(math.exp(float(query[row, head] @ slot[:SIZE]) * SIZE**-0.5))
                total += weights[-1] * slot[SIZE:]
            if sinks is not None:
                weights.append(math.exp(float(sinks[head])))
            output[row, head] = total / sum(weights)
    return output


def test_it_is_causal_attention() -> None:
    impl, *arguments = problem()
    torch.testing.assert_close(run(impl, *arguments), plain(*arguments))


@pytest.mark.parametrize("chunk", [1, 7, 16, 31, 32, 1000])
def test_chunks(chunk: int) -> None:
    """Rows at the positions 30 to 32 lie in two chunks of 31 or of 32."""
    impl, query, cache, metadata = problem()
    impl.chunk = chunk
    expected = plain(query, cache, metadata, chunk=chunk)
    # Blocks before the chunk of the first row may be the null block.
    for row, length, new in zip(metadata.block_table, (21, 5, 9, 33), (1, 5, 0, 3)):
        cache[row[: (length - new) // chunk * chunk // BLOCK].long()] = float("nan")
    torch.testing.assert_close(run(impl, query, cache, metadata), expected)
    impl.chunk = 0
    assert chunk == 1000 or not torch.equal(run(impl, query, cache, metadata), expected)


@pytest.mark.parametrize("window", [1, 7, 16, 18, 1000])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_windows_and_sinks(window: int, with_sinks: bool) -> None:
    impl, query, cache, metadata = problem()
    impl.sliding_window = window
    impl.sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if with_sinks else None
    expected = plain(query, cache, metadata, window=window, sinks=impl.sinks)
    # Blocks whose keys no row sees may be the null block.
    for row, length, new in zip(metadata.block_table, (21, 5, 9, 33), (1, 5, 0, 3)):
        cache[row[: max(0, length - new - window + 1) // BLOCK].long()] = float("nan")
    torch.testing.assert_close(run(impl, query, cache, metadata), expected)


def test_a_key_less_is_noticed() -> None:
    impl, *arguments = problem()
    with pytest.raises(AssertionError):
        torch.testing.assert_close(run(impl, *arguments), plain(*arguments, lag=1))


def test_without_metadata_the_output_is_zero() -> None:
    impl, query, cache, _ = problem()
    assert not run(impl, query, cache, None).any()  # type: ignore[arg-type]


def test_keys_are_stored_at_their_slots() -> None:
    impl, _, cache, _ = problem()
    before = cache.clone()
    key, value = torch.randn(2, 4, KV_HEADS, SIZE, generator=torch.Generator().manual_seed(1))
    slots = torch.tensor([3, -1, 5 * BLOCK + 15, 0, 99])
    impl.do_kv_cache_update(torch.nn.Module(), key, value, cache, slots)
    for row, slot in ((0, 3), (2, 5 * BLOCK + 15), (3, 0)):
        before[slot // BLOCK, :, slot % BLOCK] = torch.cat([key[row], value[row]], -1)
    assert torch.equal(cache, before)


def layer(**changes: Any) -> Any:
    impl = SimpleNamespace(
        num_heads=HEADS,
        head_size=SIZE,
        scale=0.5,
        sliding_window=17,
        sinks="sinks",
        logits_soft_cap=changes.pop("cap", None),
    )
    return SimpleNamespace(
        impl=impl,
        num_kv_heads=KV_HEADS,
        attn_type="decoder",
        **{"kv_cache_dtype": "auto", **changes},
    )


def test_a_layer_is_given_the_back_end() -> None:
    one = layer(attention_chunk_size=64)
    torch_attention.replace(one)
    assert one.attn_backend is torch_attention.TorchAttentionBackend
    assert (one.impl.num_heads, one.impl.num_kv_heads, one.impl.scale) == (HEADS, KV_HEADS, 0.5)
    assert (one.impl.sliding_window, one.impl.sinks, one.impl.chunk) == (17, "sinks", 64)


@pytest.mark.parametrize("changes", [{"kv_cache_dtype": "fp8_e4m3"}, {"cap": 30.0}])
def test_what_it_does_not_compute_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="on a CPU supports neither --kv-cache-dtype fp8 nor"):
        torch_attention.replace(layer(**changes))
