"""The metadata of a draft's passes, narrowed to its window, layer by layer."""

import itertools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.spec_decode.targets.dense.test_attention_layer import (
    HEADS,
    NAME,
    ROWS,
    SIZE,
    make_context,
    make_layer,
)
from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.targets.dense import plain_attention as torch_attention
from vllm_graft.spec_decode.targets.dense.layer import DraftTreeMetadata, graft_attention
from vllm_graft.spec_decode.targets.dense.plain_attention import (
    TorchAttentionImpl,
    windowed_table_reference,
)
from vllm_graft.spec_decode.targets.dense.window import DraftWindow, WholeBatch
from vllm_graft.spec_decode.verification.context import VerifyMode

WINDOW, BLOCK = 20, 16


@dataclass
class Metadata:
    """What FlashAttention's metadata have that matters here."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    scheduler_metadata: torch.Tensor | None


def metadata() -> Metadata:
    """Two requests, of 100 and 30 tokens, with 5 and 2 rows."""
    return Metadata(
        query_start_loc=torch.tensor([0, 5, 7]),
        seq_lens=torch.tensor([100, 30]),
        block_table=torch.arange(20).view(2, 10),
        max_query_len=5,
        max_seq_len=160,
        num_actual_tokens=7,
        scheduler_metadata=torch.zeros(3),
    )


def level(number: int) -> DraftTreeMetadata:
    """A level behind texts of 100 and 30 tokens."""
    return DraftTreeMetadata(
        level=number,
        topk=2,
        num_reqs=2,
        prefix_lens=torch.tensor([100, 30]),
        block_table=torch.arange(20).view(2, 10),
        ancestors=torch.zeros(2, 2, 3),
        scratch=torch.zeros(2, 6, HEADS, 2 * SIZE),
        max_seq_len=4096,
    )


def windowed() -> DraftWindow:
    return DraftWindow(WINDOW, windowed_table_reference)


def test_a_pass_over_accepted_rows() -> None:
    whole = metadata()
    found = windowed().of_extend(whole, BLOCK)
    # The first request's window begins at position 75, in the block that begins at 64.
    assert found.block_table.tolist() == [[0, 4, 5, 6], [10, 11, 0, 0]]
    assert found.seq_lens.tolist() == [100 - 3 * BLOCK, 30]
    assert found.max_seq_len == 64
    assert found.scheduler_metadata is None
    assert (found.max_query_len, found.num_actual_tokens) == (5, 7)
    # The target's layers read the same object.
    assert whole.seq_lens.tolist() == [100, 30]
    assert whole.scheduler_metadata is not None


def test_the_levels_of_a_tree_share_a_table() -> None:
    calls: list[int] = []

    def narrow(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return windowed_table_reference(*args, **kwargs)

    window = DraftWindow(WINDOW, narrow)
    found = [window.of_level(level(number), BLOCK) for number in (0, 1, 2)]
    assert len(calls) == 1
    for each in found:
        # It begins at position 80, which begins a block.
        assert each.block_table.tolist() == [[0, 5, 6, 0], [10, 11, 0, 0]]
        assert each.prefix_lens.tolist() == [100 - 4 * BLOCK, 30]
        assert each.max_seq_len == 4 * BLOCK
    window.of_level(level(0), BLOCK)
    assert len(calls) == 2


@pytest.mark.parametrize("is_draft", [True, False])
def test_layers_of_drafts_alone_have_one(is_draft: bool) -> None:
    layer, context = make_layer(), make_context(VerifyMode.NONE)
    stock = layer.impl
    context.draft_window = WINDOW
    graft_attention(NAME, layer, context, is_draft=is_draft)
    if layer.impl.window is not None:
        layer.impl.window = windowed()
    query, output = torch.ones(ROWS, HEADS, SIZE), torch.zeros(ROWS, HEADS, SIZE)
    cache, given = torch.zeros(20, HEADS, BLOCK, 2 * SIZE), metadata()
    layer.impl.forward(layer, query, query, query, cache, given, output)
    [(*_, seen, _, _, _)] = stock.calls
    assert (seen is given) != is_draft
    assert seen.seq_lens.tolist() == [52 if is_draft else 100, 30]


@pytest.mark.parametrize("own", [17, (16, 0)])
def test_a_layer_with_a_window_of_its_own_is_refused(own: Any) -> None:
    layer, context = make_layer(), make_context(VerifyMode.NONE)
    context.draft_window = WINDOW
    layer.impl.sliding_window = own
    with pytest.raises(ConfigError) as caught:
        graft_attention(NAME, layer, context, is_draft=True)
    message = str(caught.value)
    assert message.startswith("--additional-config.graft.tree.draft_window needs a draft of plain")
    assert f"layer {NAME} has a window of 17 positions of its own: drop the key" in message
    graft_attention(NAME, layer, context, is_draft=False)


CPU_HEADS, KV_HEADS, CPU_SIZE, CPU_BLOCK = 4, 2, 8, 16


def problem() -> tuple[TorchAttentionImpl, torch.Tensor, torch.Tensor, WholeBatch]:
    """Make requests of 1 new key after 20, 5 after 0, none, 3 after 30."""
    generator = torch.Generator().manual_seed(0)
    lengths, new = [21, 5, 9, 33], [1, 5, 0, 3]
    starts = torch.tensor([0, *new]).cumsum(0).int()
    tables = torch.randperm(12, generator=generator).view(4, 3).int()
    cache = torch.randn(12, KV_HEADS, CPU_BLOCK, 2 * CPU_SIZE, generator=generator)
    query = torch.randn(sum(new) + 2, CPU_HEADS, CPU_SIZE, generator=generator)
    metadata = WholeBatch(starts, torch.tensor(lengths), tables, max(new), max(lengths))
    stock = SimpleNamespace(
        num_heads=CPU_HEADS,
        head_size=CPU_SIZE,
        scale=CPU_SIZE**-0.5,
        sliding_window=None,
        sinks=None,
    )
    return TorchAttentionImpl(stock, KV_HEADS), query, cache, metadata


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
        for row, head in itertools.product(range(first, last), range(CPU_HEADS)):
            seen = length - (last - 1 - row) - lag
            weights, total = [], torch.zeros(CPU_SIZE)
            position = seen - 1
            for key in range(max(0, seen - window, position - position % chunk), seen):
                slot = cache[
                    int(metadata.block_table[r, key // CPU_BLOCK]), head // 2, key % CPU_BLOCK
                ]
                weights.append(math.exp(float(query[row, head] @ slot[:CPU_SIZE]) * CPU_SIZE**-0.5))
                total += weights[-1] * slot[CPU_SIZE:]
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
        cache[row[: (length - new) // chunk * chunk // CPU_BLOCK].long()] = float("nan")
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
        cache[row[: max(0, length - new - window + 1) // CPU_BLOCK].long()] = float("nan")
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
    key, value = torch.randn(2, 4, KV_HEADS, CPU_SIZE, generator=torch.Generator().manual_seed(1))
    slots = torch.tensor([3, -1, 5 * CPU_BLOCK + 15, 0, 99])
    impl.do_kv_cache_update(torch.nn.Module(), key, value, cache, slots)
    for row, slot in ((0, 3), (2, 5 * CPU_BLOCK + 15), (3, 0)):
        before[slot // CPU_BLOCK, :, slot % CPU_BLOCK] = torch.cat([key[row], value[row]], -1)
    assert torch.equal(cache, before)


def layer(**changes: Any) -> Any:
    impl = SimpleNamespace(
        num_heads=CPU_HEADS,
        head_size=CPU_SIZE,
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
    assert (one.impl.num_heads, one.impl.num_kv_heads, one.impl.scale) == (CPU_HEADS, KV_HEADS, 0.5)
    assert (one.impl.sliding_window, one.impl.sinks, one.impl.chunk) == (17, "sinks", 64)


@pytest.mark.parametrize("changes", [{"kv_cache_dtype": "fp8_e4m3"}, {"cap": 30.0}])
def test_what_it_does_not_compute_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="on a CPU supports neither --kv-cache-dtype fp8 nor"):
        torch_attention.replace(layer(**changes))
